#!/usr/bin/env bash
# Gets a folder ready for the rig: writes the project into its tpu.env, looks for the tools, and after asking enables the APIs
# that the rig calls and registers the plugin with Claude Code. A second run changes nothing that is as it should be.
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
apis=(tpu.googleapis.com compute.googleapis.com secretmanager.googleapis.com cloudbilling.googleapis.com)
plugin=gemma4-rust-rig@torchtpu-rs

usage() {
  cat <<'TEXT'
Usage: ./project-setup.sh FOLDER --project ID [--zone ZONE] [--yes] [--dry-run]

  FOLDER         where Claude Code or torchtpu-rig will run; its tpu.env is changed, or made from this tree's
  --project ID   the Google Cloud project that pays for the VM
  --zone ZONE    instead of us-west4-a, the only one with flex-start v5e-1
  --yes          do not ask before APIs are enabled and the plugin is registered
  --dry-run      change nothing, and print each command that would be run
TEXT
}

say() { echo "$*"; }

refuse() { # refuse TEXT: what was expected, what was found, what to do
  echo "project-setup.sh: $*" >&2
  exit 1
}

misused() {
  echo "project-setup.sh: $*" >&2
  usage >&2
  exit 2
}

run() { # run COMMAND...: printed, and run unless nothing may change
  local line
  line=$(printf '%q ' "$@")
  echo "+ ${line% }"
  [[ -n $dry_run ]] || "$@"
}

agree() { # agree QUESTION: the user says yes, or has said so for everything
  if [[ -n $dry_run ]]; then
    say "? $1"
    return 0
  fi
  if [[ -n $yes ]]; then
    say "$1 yes"
    return 0
  fi
  local answer=""
  read -r -p "$1 [y/N] " answer || true
  [[ $answer == [yY] || $answer == [yY][eE][sS] ]]
}

# -- what was asked for --------------------------------------------------------------------------------

folder="" project="" zone="" yes="" dry_run=""
while (($#)); do
  case $1 in
    --project | --zone)
      (($# > 1)) && [[ $2 != -* ]] || misused "expected a value for $1, found none"
      if [[ $1 == --project ]]; then project=$2; else zone=$2; fi
      shift
      ;;
    --project=*) project=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --yes) yes=1 ;;
    --dry-run) dry_run=1 ;;
    -h | --help)
      usage
      exit
      ;;
    -*) misused "expected an option of the list, found $1" ;;
    *)
      [[ -z $folder ]] || misused "expected one folder, found $folder and $1"
      folder=$1
      ;;
  esac
  shift
done
[[ -n $folder ]] || misused "expected a folder, found none"
[[ -n $project ]] || misused "expected --project with the project that pays, found none (gcloud projects list shows yours)"
[[ -d $folder ]] || refuse "expected a folder, found no $folder; make it with mkdir -p"
# Ids, and the older ones of an organization: example.com:name.
[[ $project =~ ^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$ ]] ||
  refuse "expected the id of a project (my-project-123), found '$project'; gcloud projects list shows yours"
[[ -z $zone || $zone =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "expected a zone (us-west4-a), found '$zone'"

# -- tools ---------------------------------------------------------------------------------------------

python=""
for name in "${PYTHON:-}" "$tree/.venv/bin/python" python3.14 python3.13 python3.12 python3.11 python3; do
  if [[ -n $name ]] && "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
    python=$name
    break
  fi
done
[[ -n $python ]] || refuse "expected Python 3.11 to 3.14, found $(python3 --version 2>/dev/null || echo none);" \
  "install one (apt install python3 python3-venv, brew install python@3.13, uv python install 3.13) and run this again"
command -v gcloud >/dev/null ||
  refuse "expected gcloud, found none; install it from https://cloud.google.com/sdk/docs/install and run this again"
say "✔ $("$python" --version), gcloud"
has_claude=""
if command -v claude >/dev/null; then
  has_claude=1
  say "✔ claude"
else
  say "· no claude: the rig works without it, as torchtpu-rig on the command line"
fi

# -- settings ------------------------------------------------------------------------------------------

file=$folder/tpu.env
new=""
trap '[[ -z $new ]] || rm -f "$new"' EXIT

with_key() { # with_key KEY VALUE: stdin with that key set, and every other line as it was
  awk -v key="$1" -v value="$2" '
    index($0, key "=") == 1 { print key "=" value; found = 1; next }
    { print }
    END { if (!found) print key "=" value }'
}

settings() { # settings: what tpu.env should be
  local source=$file
  [[ -e $file ]] || source=$tree/tpu.env
  if [[ -n $zone ]]; then
    with_key PROJECT_ID "$project" <"$source" | with_key ZONE "$zone"
  else
    with_key PROJECT_ID "$project" <"$source"
  fi
}

if [[ -e $file && ! -w $file ]] || [[ ! -e $file && ! -w $folder ]]; then
  refuse "expected to write $file, found that it may not be written; change its owner or mode"
fi
if [[ -e $file ]] && settings | cmp -s - "$file"; then
  say "✔ $file has PROJECT_ID=$project${zone:+ and ZONE=$zone}"
elif [[ -n $dry_run ]]; then
  say "+ write PROJECT_ID=$project${zone:+ and ZONE=$zone} into $file$([[ -e $file ]] || echo ", a copy of $tree/tpu.env")"
else
  # Whole or not at all: nobody reads half a file.
  new=$(mktemp "$folder/.tpu.env.XXXXXX")
  settings >"$new"
  chmod "$([[ -e $file ]] && { stat -c %a "$file" 2>/dev/null || stat -f %Lp "$file"; } || echo 644)" "$new"
  mv "$new" "$file"
  new=""
  say "✔ wrote PROJECT_ID=$project${zone:+ and ZONE=$zone} into $file"
fi

# -- the project ---------------------------------------------------------------------------------------

if [[ -n $dry_run ]]; then
  run gcloud auth list --filter=status:ACTIVE "--format=value(account)"
  run gcloud services list --enabled "--project=$project" "--format=value(config.name)"
  missing=("${apis[@]}")
else
  account=$(gcloud auth list --filter=status:ACTIVE "--format=value(account)" 2>/dev/null || true)
  [[ -n $account ]] ||
    refuse "expected somebody signed in with gcloud, found nobody; run gcloud auth login, gcloud auth application-default login, and this again"
  say "✔ signed in as $account"
  enabled=$(gcloud services list --enabled "--project=$project" "--format=value(config.name)") ||
    refuse "expected to list the services of $project, found the error above; look whether the id is right and whether $account may see it"
  missing=()
  for api in "${apis[@]}"; do
    grep -qxF "$api" <<<"$enabled" || missing+=("$api")
  done
fi
if ((${#missing[@]} == 0)); then
  say "✔ ${apis[*]} are enabled in $project"
elif agree "Enable ${missing[*]} in $project? That costs nothing by itself."; then
  run gcloud services enable "${missing[@]}" "--project=$project" ||
    refuse "expected to enable the services, found the error above; it needs roles/serviceusage.serviceUsageAdmin, and billing for the project"
else
  say "· not enabled; before the rig can create a VM: gcloud services enable ${missing[*]} --project=$project"
fi

# -- Claude Code ---------------------------------------------------------------------------------------

if [[ -n $has_claude ]]; then
  if [[ -z $dry_run ]] && claude plugin list --json 2>/dev/null | grep -qF "\"$plugin\""; then
    say "✔ Claude Code has the plugin $plugin"
  else
    # Claude Code keeps a copy of the whole tree, with all that was built in it.
    built=$(du -shc "$tree/.venv" "$tree/rust/target" 2>/dev/null | tail -n 1 | cut -f1)
    [[ -d $tree/.venv || -d $tree/rust/target ]] || built=""
    if agree "Register the plugin $plugin of $tree with Claude Code?${built:+ It copies the tree, with $built that were built in it; a fresh clone is smaller.}"; then
      if ! { run claude plugin marketplace add "$tree" && run claude plugin install "$plugin"; }; then
        refuse "expected Claude Code to take the plugin, found the error above; claude plugin validate $tree shows more"
      fi
    else
      say "· not registered; later: claude plugin marketplace add $tree && claude plugin install $plugin"
    fi
  fi
fi

say "Next: in $folder start claude and ask it to create the rig, or run: torchtpu-rig doctor --settings $file"
