#!/bin/bash
# Boots the rig's VM: each stage is a function, runs once for each version of its inputs, and is published as a guest attribute.
#
# Run as root by google-startup-scripts.service at every boot. The sources and the settings travel in the VM's metadata
# (rig/bundle.py). The attribute rig/stage says where the boot is; rig/progress says of each stage how long it took, when it
# began and what it told, then DONE, or which one failed and the end of the log. The API key is in none of them.
# Sourced by the tests, with RIG_SOURCE_ONLY set.
set -Eeuo pipefail
shopt -s inherit_errexit

: "${GCE_METADATA_HOST:=metadata.google.internal}"
: "${RIG_ROOT:=/}"
: "${RIG_HOME:=${RIG_ROOT%/}/opt/torchtpu-rs}"
: "${RIG_ETC:=${RIG_ROOT%/}/etc/torchtpu-rs}"
: "${RIG_LOG:=${RIG_ROOT%/}/var/log/torchtpu-rs-boot.log}"
: "${RIG_SYSTEMD:=${RIG_ROOT%/}/etc/systemd/system}"
# The first start on a chip compiles every program.
: "${RIG_HEALTH_SECONDS:=1200}"
# Between two writes of guest attributes, in seconds: three a second are allowed.
: "${RIG_PAUSE:=0.4}"

STAGES=(python torch rust crate weights smoke unit serving)
NEEDED=(PYTHON_BIN TORCH_PIP_SPEC RUST_TOOLCHAIN CHECKPOINTS REVISIONS SERVE_CONTEXT SERVE_STEP SERVE_DEFER_AND_FUSE SERVE_SLOTS
  SERVE_PORT PROVISIONING_MODEL MAX_RUN_DURATION IDLE_MINUTES)
SERVICE=torchtpu-rs.service
KEEPER=torchtpu-rs-keeper.service
END=torchtpu-rs-end

HISTORY=""  # of stages that are done: a line each, and indented what it told
TOLD=""     # by the stage that runs
CURRENT=start
HOW=start   # what systemd is asked to do with the service; `restart` where something of it is new
WRITTEN=0   # when an attribute was written last, in microseconds

# -- the metadata server -------------------------------------------------------------------------------

metadata() { # metadata ATTRIBUTE: its value; fails when there is none
  curl -fsS -m 10 --retry 3 -H "Metadata-Flavor: Google" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/$1"
}

microseconds() { echo "${EPOCHREALTIME//[!0-9]/}"; }

# Three writes a second are allowed for each VM and ten a minute, readers included; one that exceeds that may be dropped. So
# every write of rig/progress carries the whole history, and a lost one loses nothing. A boot goes on without them.
publish() { # publish KEY TEXT
  (($(microseconds) - WRITTEN > 1000000)) || sleep "$RIG_PAUSE"
  curl -fsS -m 5 --retry 1 -X PUT -H "Metadata-Flavor: Google" --data-binary "$2" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/guest-attributes/rig/$1" >/dev/null 2>&1 ||
    echo "cannot publish rig/$1; the boot goes on"
  WRITTEN=$(microseconds)
}

# curl reads the token from a pipe: arguments can be seen by every process.
as_this_vm() { # as_this_vm curl's arguments...: asks a Google API as the VM's account
  local token
  # Without Python, which may not be there yet.
  token=$(curl -fsS -m 10 --retry 3 -H "Metadata-Flavor: Google" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/service-accounts/default/token" |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p')
  curl -fsS -m 20 --retry 3 -H @<(printf 'Authorization: Bearer %s' "$token") "$@"
}

secret() { # secret NAME: the newest version of a Secret Manager secret; nothing without a name
  [[ -n $1 ]] || return 0
  as_this_vm "${SECRETMANAGER_API_ENDPOINT:-https://secretmanager.googleapis.com}/v1/projects/${PROJECT_ID:?}/secrets/$1/versions/latest:access" |
    field payload data | base64 -d
}

field() { # field NAME...: a value inside the JSON on stdin
  "$RIG_HOME/venv/bin/python" -c 'import functools, json, sys
print(functools.reduce(dict.__getitem__, sys.argv[1:], json.load(sys.stdin)))' "$@"
}

# -- how stages run ------------------------------------------------------------------------------------

retry() { # retry TIMES PAUSE command...
  local times=$1 pause=$2 attempt
  shift 2
  for ((attempt = 1; ; attempt++)); do
    "$@" && return 0
    ((attempt >= times)) && return 1
    echo "attempt $attempt of $times failed: $*"
    sleep "$pause"
  done
}

tell() { # tell TEXT: into the log, and into the history under the stage that runs
  local line
  while IFS= read -r line; do
    echo "$line"
    TOLD+="  ${line:0:120}"$'\n'
  done <<<"$1"
}

# A stage is done for as long as neither this script nor what it was given changes.
inputs() { # inputs: what stages depend on, as one hash
  { cat "${BASH_SOURCE[0]}"; metadata settings; metadata bundle-sha256; } | sha256sum | cut -c1-16
}

stage() { # stage NAME: runs stage_NAME unless it is done
  local name=$1 stamp=$RIG_HOME/done/$1.$INPUTS begun=$SECONDS at
  CURRENT=$name TOLD=""
  echo "STAGE: $name"
  if [[ -e $stamp && $name != serving ]]; then
    echo "already done"
    HISTORY+=$(<"$stamp")$'\n'
    return
  fi
  at=$(date -u +%FT%TZ)
  publish stage "STAGE: $name"
  "stage_$name"
  printf '%s %s s, began %s\n%s' "$name" $((SECONDS - begun)) "$at" "$TOLD" >"$stamp.new"
  mv "$stamp.new" "$stamp"
  HISTORY+=$(<"$stamp")$'\n'
  # After a short stage the next write is near, and carries this too.
  ((SECONDS - begun < 6)) || publish progress "$HISTORY"
}

ended() { # the shell ends: unless the boot is done, publishes what went wrong; the status stays
  local status=$? why waited
  trap - ERR EXIT
  set +e
  [[ $CURRENT != over ]] || exit "$status"
  why="FAILED: stage $CURRENT, line ${LINE:-unknown}, status $status"
  echo "$why"
  # tee is a process of its own: once this line is in the log, so is what came before.
  for ((waited = 0; waited < 50; waited++)); do
    tail -n 1 "$RIG_LOG" | grep -qxF "$why" && break
    sleep 0.1
  done
  publish progress "$HISTORY$why"$'\n'"$(log_end $((1900 - ${#HISTORY} - ${#why})))"
  publish stage "FAILED: $CURRENT"
  exit "$status"
}

log_end() { # log_end BYTES: the last lines before the one that says what failed
  tail -n 21 "$RIG_LOG" | sed '$d' | LC_ALL=C tr -cd '\11\12\40-\176' | cut -c1-200 | tail -c "$1"
}

settings() { # reads tpu.env from the metadata into this shell; nothing in it is run
  mkdir -p "$RIG_ETC"
  metadata settings >"$RIG_ETC/tpu.env.new"
  mv "$RIG_ETC/tpu.env.new" "$RIG_ETC/tpu.env"
  local line key value
  while IFS= read -r line; do
    [[ $line =~ ^([A-Z][A-Z0-9_]*)=(.*)$ ]] || continue
    key=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
    # A value with quotes of its own at its begin is written inside another pair.
    [[ $value =~ ^\"(.*)\"$ ]] && value=${BASH_REMATCH[1]}
    export "$key=$value"
  done <"$RIG_ETC/tpu.env"
  for key in "${NEEDED[@]}"; do
    [[ -n ${!key:-} ]] || { echo "expected the setting $key in the VM's metadata, found none"; return 1; }
  done
}

environment() { # what every stage's commands find
  # The service that runs this script has no home.
  export HOME=${HOME:-/root}
  # Nobody answers questions, and no service is restarted because a library of its changed.
  export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
  # Finished downloads stay, so that a second try and a second boot go on from there.
  export UV_CACHE_DIR=$RIG_HOME/cache/uv UV_HTTP_TIMEOUT=120 HF_HOME=$RIG_HOME/cache/hf HF_HUB_DISABLE_PROGRESS_BARS=1
  export HF_HUB_DISABLE_UPDATE_CHECK=1 HF_HUB_DISABLE_TELEMETRY=1
  export RUSTUP_HOME=$RIG_HOME/rustup CARGO_HOME=$RIG_HOME/cargo RUSTUP_TOOLCHAIN=${RUST_TOOLCHAIN:?} CARGO_NET_RETRY=10
  export PATH=$CARGO_HOME/bin:$PATH
}

# -- the stages ----------------------------------------------------------------------------------------

apt_get() {
  # cloud-init may hold the lock for its first minutes.
  retry 5 15 apt-get -o DPkg::Lock::Timeout=300 -y -qq "$@"
}

pip_install() {
  retry 5 15 "$RIG_HOME/venv/bin/uv" pip install --quiet --python "$RIG_HOME/venv/bin/python" "$@"
}

stop_serving() { # the chip has one user at a time
  [[ ! -e $RIG_SYSTEMD/$SERVICE ]] || systemctl disable --now "$SERVICE"
}

stage_python() {
  # What was installed before must not start from an environment that is being replaced.
  stop_serving
  apt_get update
  if ! command -v "$PYTHON_BIN" >/dev/null; then
    apt_get install --no-install-recommends software-properties-common
    retry 5 15 add-apt-repository -y ppa:deadsnakes/ppa
  fi
  apt_get install --no-install-recommends "$PYTHON_BIN" "$PYTHON_BIN-dev" "$PYTHON_BIN-venv" g++ xz-utils curl ca-certificates
  tell "$(g++ --version | sed -n 1p)"
  # An environment of its own: the image's jinja2 3.0.3 is in dist-packages, which this Python would search too, and is too
  # old for chat templates. Nothing of the image is seen from here.
  "$PYTHON_BIN" -m venv --clear "$RIG_HOME/venv"
  retry 5 15 "$RIG_HOME/venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
}

stage_torch() {
  local -a spec
  # Written as for a shell: words may stand in quotes.
  mapfile -t spec < <(xargs -n 1 <<<"$TORCH_PIP_SPEC")
  pip_install "${spec[@]}"
  tell "$(TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$RIG_HOME/venv/bin/python" -c 'import torch; print("torch", torch.__version__)')"
}

stage_rust() {
  if ! rustup --version >/dev/null 2>&1; then
    curl --proto '=https' --tlsv1.2 -fsS --retry 5 https://sh.rustup.rs -o "$RIG_HOME/rustup-init.sh"
    retry 3 15 sh "$RIG_HOME/rustup-init.sh" -y -q --no-modify-path --profile minimal --default-toolchain "$RUST_TOOLCHAIN"
  fi
  cargo --version >/dev/null 2>&1 || retry 3 15 rustup toolchain install --profile minimal --no-self-update "$RUST_TOOLCHAIN"
}

stage_crate() {
  local sources=$RIG_HOME/src wheels=$RIG_HOME/wheels
  unpack "$sources"
  pins "$sources/requirements/pins.txt" >"$RIG_HOME/pins.txt"
  pip_install --constraint "$RIG_HOME/pins.txt" maturin
  tell "$(rustc --version)"
  rm -rf "$wheels"
  (cd "$sources" && CARGO_TARGET_DIR=$(target) "$RIG_HOME/venv/bin/maturin" build --release --locked --out "$wheels" \
    --interpreter "$RIG_HOME/venv/bin/python") 2>&1 | tee "$RIG_HOME/build.log"
  tell "$(grep -F Finished "$RIG_HOME/build.log")"
  pip_install --constraint "$RIG_HOME/pins.txt" --reinstall-package torchtpu-rs "torchtpu-rs[keeper] @ file://$(echo "$wheels"/*.whl)"
  keep
}

unpack() { # unpack FOLDER: the sources out of the metadata, if they came whole
  local part found expected
  for part in bundle-crate bundle-server; do
    metadata "$part" | base64 -d >"$RIG_HOME/$part.tar.xz"
  done
  found=$(cat "$RIG_HOME"/bundle-{crate,server}.tar.xz | sha256sum | cut -d' ' -f1)
  expected=$(metadata bundle-sha256)
  if [[ $found != "$expected" ]]; then
    echo "expected sources with the hash $expected, found $found"
    return 1
  fi
  rm -rf "$1"
  mkdir -p "$1"
  for part in bundle-crate bundle-server; do
    tar -C "$1" -xJf "$RIG_HOME/$part.tar.xz"
  done
  # Files have no time of their own, and cargo goes by time: the same sources are not built twice.
  find "$1" -exec touch -d @0 {} +
}

pins() { # pins FILE: what the stage before installed stays as it is; of the rest, the versions that are tested
  local fixed
  fixed=$("$RIG_HOME/venv/bin/uv" pip freeze --quiet --python "$RIG_HOME/venv/bin/python" | grep '==')
  echo "$fixed"
  grep -vf <(sed 's/==.*/==/; s/^/^/' <<<"$fixed") "$1" || true
}

# By time alone cargo would not see other sources, nor another PyTorch: what is built for them is apart.
target() { # target: the folder for cargo's outputs
  local key
  key=$({
    find "$RIG_HOME/src/rust" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    echo "$TORCH_PIP_SPEC $PYTHON_BIN"
    rustc --version
  } | sha256sum | cut -c1-16)
  mkdir -p "$RIG_HOME/target/$key"
  find "$RIG_HOME/target" -mindepth 1 -maxdepth 1 ! -name "$key" -exec rm -rf {} +
  echo "$RIG_HOME/target/$key"
}

# Only flex-start has an end of its own, and a boot that fails early has no keeper: so a timer, which a reboot starts anew.
end_in_time() {
  [[ $PROVISIONING_MODEL != flex-start ]] || return 0
  install -m 0755 "${BASH_SOURCE[0]}" "$RIG_HOME/startup.sh"
  systemctl stop "$END.timer" "$END.service" 2>/dev/null || true
  # shellcheck disable=SC2016 # read by the shell that is started
  systemd-run --quiet --collect --unit="$END" --on-active="$MAX_RUN_DURATION" \
    --setenv=RIG_SOURCE_ONLY=1 --setenv=GCE_METADATA_HOST="$GCE_METADATA_HOST" \
    /bin/bash -c '. "$1"; settings; end_vm' end "$RIG_HOME/startup.sh"
}

end_vm() { # deletes the queued resource that this VM is of
  as_this_vm -X DELETE "${TPU_API_ENDPOINT:-https://tpu.googleapis.com}/v2alpha1/projects/${PROJECT_ID:?}/locations/${ZONE:?}/queuedResources/${QUEUED_RESOURCE:?}?force=true"
}

# From here on the VM ends itself when it is idle, too.
keep() {
  install -m 0644 "$RIG_HOME/src/rig/$KEEPER" "$RIG_SYSTEMD"
  systemctl daemon-reload
  if ((IDLE_MINUTES > 0)) || [[ $PROVISIONING_MODEL != flex-start ]]; then
    api_key
    systemctl enable "$KEEPER"
    systemctl restart "$KEEPER"
  else
    systemctl disable --now "$KEEPER"
  fi
}

api_key() { # the key as it is at this boot, in a file that root alone reads
  local file=$RIG_ETC/api-key
  if ! (umask 077 && ask_for_key >"$file.new"); then
    [[ -s $file ]] || { echo "expected an API key in Secret Manager or in the metadata, found none"; return 1; }
    echo "the API key stays as it was at the last boot"
    return
  fi
  [[ -s $file.new ]] || { echo "expected an API key, found an empty one"; return 1; }
  cmp -s "$file.new" "$file" || HOW=restart
  mv "$file.new" "$file"
}

ask_for_key() {
  if [[ -n ${API_KEY_SECRET:-} ]]; then secret "$API_KEY_SECRET"; else metadata api-key; fi
}

weights() { # weights: a folder for each checkpoint, in their order
  local -a names commits
  local index
  read -ra names <<<"$CHECKPOINTS"
  read -ra commits <<<"$REVISIONS"
  for index in "${!names[@]}"; do
    echo "$RIG_HOME/weights/${names[index]//\//--}@${commits[index]//\//--}"
  done
}

stage_weights() {
  local -a names commits folders
  local index token
  read -ra names <<<"$CHECKPOINTS"
  read -ra commits <<<"$REVISIONS"
  mapfile -t folders < <(weights)
  token=$(secret "${HF_TOKEN_SECRET:-}")
  for index in "${!names[@]}"; do
    # What the server reads, and not the same weights in other formats.
    HF_TOKEN=$token retry 5 15 "$RIG_HOME/venv/bin/hf" download --quiet "${names[index]}" --revision "${commits[index]}" \
      --local-dir "${folders[index]}" --include '*.safetensors' --include '*.json' --include '*.jinja' --exclude '*/*'
  done
  # The service's user reads them; only root writes.
  chmod -R u+rwX,go+rX,go-w "$RIG_HOME/weights"
}

# As USER and under every restriction of the service, which stand in its unit from a line on.
confined() { # confined USER command...
  local user=$1
  local -a restrictions
  shift
  mapfile -t restrictions < <(sed '1,/^# -- restrictions/d; /^\[Install\]/,$d' "$RIG_HOME/src/rig/$SERVICE" | grep '^[A-Z]')
  systemd-run --quiet --wait --pipe --collect "${restrictions[@]/#/--property=}" --uid="$user" --gid="$user" "$@" </dev/null
}

stage_smoke() {
  local drop_in=$RIG_SYSTEMD/$SERVICE.d/user.conf output
  local -a smoke=("$RIG_HOME/venv/bin/torchtpu-rs" smoke --device "${SERVE_DEVICE:-tpu}")
  stop_serving
  id -u torchtpu >/dev/null 2>&1 || useradd --system --user-group --home-dir /var/lib/torchtpu-rs --shell /usr/sbin/nologin torchtpu
  rm -f "$drop_in"
  # Whether a user of its own may open the chip is the image's decision, so it is tried.
  if ! output=$(confined torchtpu "${smoke[@]}"); then
    output=$(confined root "${smoke[@]}")
    mkdir -p "$(dirname "$drop_in")"
    printf '# The user torchtpu cannot use the device.\n[Service]\nUser=root\nGroup=root\n' >"$drop_in"
    tell "the user torchtpu cannot use the device, root can: the service runs as root"
  fi
  tell "$output"
}

stage_unit() {
  local -a folders
  mapfile -t folders < <(weights)
  {
    echo "TORCHTPU_MODEL=${folders[*]}"
    echo "TORCHTPU_SERVED_MODEL_NAME=${CHECKPOINTS%% *}"
    echo "TORCHTPU_DEVICE=${SERVE_DEVICE:-tpu}"
    echo "TORCHTPU_CONTEXT=$SERVE_CONTEXT"
    echo "TORCHTPU_PORT=$SERVE_PORT"
    if [[ ${SERVE_DEVICE:-tpu} == tpu ]]; then
      echo "TORCHTPU_MODE=$([[ $SERVE_DEFER_AND_FUSE == 1 ]] && echo fused || echo "$SERVE_STEP")"
      echo "TORCHTPU_SLOTS=$SERVE_SLOTS"
      [[ -z ${SERVE_WEIGHT_FORMAT:-} ]] || echo "TORCHTPU_WEIGHT_FORMAT=$SERVE_WEIGHT_FORMAT"
    fi
  } >"$RIG_ETC/serve.env"
  install -m 0644 "$RIG_HOME/src/rig/$SERVICE" "$RIG_SYSTEMD"
  systemctl daemon-reload
  HOW=restart
}

stage_serving() {
  local waited
  api_key
  [[ $HOW != restart ]] || systemctl try-restart "$KEEPER"
  systemctl enable "$SERVICE"
  systemctl reset-failed "$SERVICE" 2>/dev/null || true
  # At a later boot systemd is starting it already.
  systemctl --no-block "$HOW" "$SERVICE"
  for ((waited = 0; waited < RIG_HEALTH_SECONDS; waited += 2)); do
    curl -fsS -m 5 -o /dev/null "http://127.0.0.1:$SERVE_PORT/health" 2>/dev/null && return 0
    if systemctl is-failed --quiet "$SERVICE"; then break; fi
    sleep 2
  done
  journalctl --unit "$SERVICE" --lines 18 --no-pager --output cat || true
  echo "expected the server to answer on port $SERVE_PORT within $RIG_HEALTH_SECONDS s"
  return 1
}

main() {
  mkdir -p "$RIG_HOME/done" "$(dirname "$RIG_LOG")"
  exec > >(tee -a "$RIG_LOG") 2>&1
  trap 'LINE=$LINENO' ERR
  trap ended EXIT
  settings
  end_in_time
  environment
  INPUTS=$(inputs)
  # A version that comes back is not done: another one was installed since.
  find "$RIG_HOME/done" -type f ! -name "*.$INPUTS" -delete
  local name
  for name in "${STAGES[@]}"; do stage "$name"; done
  CURRENT=over
  publish progress "${HISTORY}DONE"
  echo DONE
}

[[ -n ${RIG_SOURCE_ONLY:-} ]] || main "$@"
