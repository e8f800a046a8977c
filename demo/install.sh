#!/usr/bin/env bash
# Installs the demo for this user: the shim as a systemd user service, and its MCP server with Claude Code. Run again, it changes
# what is otherwise than asked for and starts the shim anew; --uninstall takes all of it away.
set -euo pipefail

tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
launch=$tree/demo/launch
name=torchtpu-rs-demo
unit=torchtpu-shim.service
config=${XDG_CONFIG_HOME:-${HOME:?expected HOME, found none}/.config}
data=${XDG_DATA_HOME:-$HOME/.local/share}/$name
settings=$config/torchtpu-rs/demo.env
unit_file=$config/systemd/user/$unit
# Where the rig's records and the sign-in are, where they are not in their usual places.
carried=(CLOUDSDK_CONFIG GOOGLE_APPLICATION_CREDENTIALS XDG_STATE_HOME XDG_DATA_HOME RIG_SETTINGS PYTHON)

usage() {
  cat <<'TEXT'
Usage: demo/install.sh [--project ID | --url URL [--api-key-file FILE]] [--port PORT]
       demo/install.sh --uninstall

  --project ID         find the rig's VM in this Google Cloud project; without it, PROJECT_ID of tpu.env
  --url URL            use this server instead, for example http://127.0.0.1:8000
  --api-key-file FILE  its API key
  --port PORT          of the shim on 127.0.0.1, instead of 8015
  --uninstall          stop the service and remove everything that this script made
TEXT
}

say() { echo "$*"; }

refuse() { # refuse TEXT: what was expected, what was found, what to do
  echo "demo/install.sh: $*" >&2
  exit 1
}

misused() {
  echo "demo/install.sh: $*" >&2
  usage >&2
  exit 2
}

has_systemd() { systemctl --user show-environment >/dev/null 2>&1; }

# -- what was asked for --------------------------------------------------------------------------------

project="" url="" key_file="" port=8015 uninstall=""
while (($#)); do
  case $1 in
    --project | --url | --api-key-file | --port)
      (($# > 1)) && [[ $2 != -* ]] || misused "expected a value for $1, found none"
      case $1 in
        --project) project=$2 ;;
        --url) url=$2 ;;
        --api-key-file) key_file=$2 ;;
        --port) port=$2 ;;
      esac
      shift
      ;;
    --uninstall) uninstall=1 ;;
    -h | --help)
      usage
      exit
      ;;
    *) misused "expected an option of the list, found $1" ;;
  esac
  shift
done
[[ -z $project || -z $url ]] || misused "expected --project or --url, found both"
# Ids, and the older ones of an organization: example.com:name.
[[ -z $project || $project =~ ^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$ ]] ||
  refuse "expected the id of a project (my-project-123), found '$project'; gcloud projects list shows yours"
[[ -z $url || $url =~ ^https?://[][A-Za-z0-9._:/-]+$ ]] ||
  refuse "expected an address like http://127.0.0.1:8000, found '$url'"
[[ -z $key_file || -r $key_file ]] || refuse "expected an API key in $key_file, found that it cannot be read"
[[ $port =~ ^[1-9][0-9]{0,4}$ && $port -lt 65536 ]] || refuse "expected a port (8015), found '$port'"

unregister() { # unregister: from Claude Code, where it is registered there
  command -v claude >/dev/null || return 0
  local told
  if told=$(claude mcp remove --scope user "$name" 2>&1); then
    say "✔ removed $name from Claude Code"
  elif [[ $told != *"No MCP server"* ]]; then
    refuse "expected Claude Code to forget $name, found: $told"
  fi
}

# -- away with it --------------------------------------------------------------------------------------

remove() { # remove: the service, its files, the registration, the environment
  if [[ -e $unit_file ]]; then
    if has_systemd; then
      systemctl --user --quiet disable --now "$unit"
    else
      rm -f "$config/systemd/user/default.target.wants/$unit"
    fi
    rm -f "$unit_file"
    if has_systemd; then
      systemctl --user daemon-reload
      systemctl --user reset-failed "$unit" 2>/dev/null || true # It failed only where there was something to reset.
    fi
    say "✔ removed the service $unit"
  fi
  rm -f "$settings"
  rm -rf "$data"
  local folder
  for folder in "$config/torchtpu-rs" "$config"/systemd/user/{default.target.wants,} "$config/systemd" "$config" "${data%/*}" "${data%/*/*}"; do
    # Only those that are empty now.
    rmdir "$folder" 2>/dev/null || true
  done
  unregister
  say "✔ nothing of the demo is left"
}

if [[ -n $uninstall ]]; then
  remove
  exit
fi

# -- the shim as a service -----------------------------------------------------------------------------

# Makes the environment, where the tree has none, while somebody reads what is said about it.
"$launch" shim --help >/dev/null || refuse "expected the shim to start, found the error above"
say "✔ the shim can start"

in_settings() { # in_settings KEY VALUE: as a line of an EnvironmentFile
  local value=$2
  value=${value//\\/\\\\}
  value=${value//\"/\\\"}
  value=${value//\$/\\\$}
  value=${value//\`/\\\`}
  printf '%s="%s"\n' "$1" "$value"
}

in_unit() { # in_unit TEXT: as part of a quoted word of a unit
  local text=$1
  text=${text//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//%/%%}
  printf '%s' "$text"
}

with() { # with WORD TEXT: stdin with @WORD@ replaced
  local line
  while IFS= read -r line; do
    printf '%s\n' "${line//"@$1@"/"$2"}"
  done
}

settings_text() {
  local key
  in_settings TORCHTPU_SHIM_PORT "$port"
  [[ -z $project ]] || in_settings PROJECT_ID "$project"
  [[ -z $url ]] || in_settings TORCHTPU_SHIM_UPSTREAM "$url"
  [[ -z $key_file ]] || in_settings TORCHTPU_SHIM_API_KEY_FILE "$(cd "$(dirname "$key_file")" && pwd -P)/$(basename "$key_file")"
  for key in "${carried[@]}" $(compgen -e | grep '_API_ENDPOINT$' || true); do
    [[ -z ${!key:-} ]] || in_settings "$key" "${!key}"
  done
}

unit_text() {
  local gcloud
  gcloud=$(command -v gcloud || true)
  # In a quoted command line $ begins a variable, doubled it is itself.
  local start
  start=$(in_unit "$launch")
  with LAUNCH "${start//\$/\$\$}" <"$tree/demo/$unit" |
    with SETTINGS "${settings//%/%%}" |
    with GCLOUD "${gcloud:+$(in_unit "${gcloud%/*}"):}"
}

foreground() { # foreground: how to start the shim by hand
  local options=()
  [[ -z $project ]] || options+=(--project "$project")
  [[ -z $url ]] || options+=(--url "$url")
  [[ -z $key_file ]] || options+=(--api-key-file "$key_file")
  ((port == 8015)) || options+=(--port "$port")
  local line
  line=$(printf '%q ' "$launch" shim ${options[@]+"${options[@]}"})
  echo "${line% }"
}

if has_systemd; then
  mkdir -p "${settings%/*}" "${unit_file%/*}"
  (umask 077 && settings_text >"$settings")
  unit_text >"$unit_file"
  systemctl --user daemon-reload
  systemctl --user --quiet enable "$unit"
  systemctl --user restart "$unit" ||
    refuse "expected the service to start, found an error; journalctl --user -u $unit shows it (a port that is taken: --port)"
  say "✔ $unit runs, and starts with your session (loginctl enable-linger keeps it without one)"
  say "  http://127.0.0.1:$port is the chat page, http://127.0.0.1:$port/v1 the OpenAI API"
else
  say "· no systemd user instance here; keep the shim running in a terminal:"
  say "  $(foreground)"
fi

# -- the MCP server ------------------------------------------------------------------------------------

environment=()
((port == 8015)) || environment+=("TORCHTPU_SHIM_URL=http://127.0.0.1:$port")
[[ -z ${PYTHON:-} ]] || environment+=("PYTHON=$PYTHON")

in_json() { # in_json TEXT: as a JSON string
  local text=$1
  text=${text//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

json() { # json: what other MCP clients have in their settings
  local one pairs=()
  for one in ${environment[@]+"${environment[@]}"}; do
    pairs+=("$(in_json "${one%%=*}"): $(in_json "${one#*=}")")
  done
  local IFS=,
  echo "{\"mcpServers\": {\"$name\": {\"command\": $(in_json "$launch"), \"args\": [\"mcp_server\"], \"env\": {${pairs[*]}}}}}"
}

add=(claude mcp add --scope user "$name")
((${#environment[@]} == 0)) || add+=(-e "${environment[@]}")
add+=(-- "$launch" mcp_server)
if command -v claude >/dev/null; then
  unregister >/dev/null
  "${add[@]}" >/dev/null || refuse "expected Claude Code to take $name, found the error above"
  say "✔ Claude Code has $name"
else
  line=$(printf '%q ' "${add[@]}")
  say "· no claude here; where it is: ${line% }"
fi
say "Other MCP clients:"
json
