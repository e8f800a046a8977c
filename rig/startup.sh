#!/bin/bash
# Boots the rig's VM: each stage is a function, runs once for each version of its inputs, and is published as a guest attribute.
#
# Run as root by google-startup-scripts.service at every boot. The sources and the settings travel in the VM's metadata
# (rig/bundle.py); the attribute rig/stage says where the boot is, rig/progress how long each stage took and why one failed.
# Sourced by the tests, with RIG_SOURCE_ONLY set.
set -Eeuo pipefail

: "${GCE_METADATA_HOST:=metadata.google.internal}"
: "${RIG_ROOT:=/}"
: "${RIG_STATE:=${RIG_ROOT%/}/var/lib/torchtpu-rs}"
: "${RIG_HOME:=${RIG_ROOT%/}/opt/torchtpu-rs}"
: "${RIG_ETC:=${RIG_ROOT%/}/etc/torchtpu-rs}"
: "${RIG_LOG:=${RIG_ROOT%/}/var/log/torchtpu-rs-boot.log}"
: "${RIG_SYSTEMD:=${RIG_ROOT%/}/etc/systemd/system}"
# What the VM is to become before it says that it serves.
: "${RIG_HEALTH_SECONDS:=1200}"
STAGES=(python torch rust crate weights smoke unit serving)
HISTORY=""
CURRENT=start

# -- the metadata server -------------------------------------------------------------------------------

metadata() { # metadata ATTRIBUTE: its value; fails when there is none
  curl -fsS -m 10 --retry 3 -H "Metadata-Flavor: Google" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/$1"
}

# Ten queries a minute and three a second are allowed for each VM, and what exceeds that may be dropped: two writes a stage,
# the whole history in each, so that a lost one loses nothing. A boot goes on without them.
publish() { # publish KEY TEXT
  curl -fsS -m 5 --retry 1 -X PUT -H "Metadata-Flavor: Google" --data-binary "$2" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/guest-attributes/rig/$1" >/dev/null 2>&1 || true
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

# A stage is done for as long as neither this script nor what it was given changes.
inputs() { # inputs: what stages depend on, as one hash
  { cat "${BASH_SOURCE[0]}"; metadata settings || true; metadata bundle-sha256 || true; } | sha256sum | cut -c1-16
}

stage() { # stage NAME: runs stage_NAME unless it is done
  local name=$1 begun=$SECONDS
  CURRENT=$name
  echo "STAGE: $name"
  publish stage "STAGE: $name"
  if [[ -e $RIG_STATE/boot/$name.$INPUTS && $name != serving ]]; then
    echo "already done"
  else
    "stage_$name"
    touch "$RIG_STATE/boot/$name.$INPUTS"
  fi
  HISTORY+="$name $((SECONDS - begun)) s"$'\n'
  publish progress "$HISTORY"
}

failed() { # failed LINE: publishes what went wrong and ends with the same status
  local status=$? line=$1
  trap - ERR
  set +e
  echo "FAILED: stage $CURRENT, line $line, status $status"
  publish progress "${HISTORY}FAILED: stage $CURRENT, line $line, status $status
$(tail -n 20 "$RIG_LOG" 2>/dev/null | cut -c1-200 | tail -c 1500)"
  publish stage "FAILED: $CURRENT"
  exit "$status"
}

settings() { # reads tpu.env from the metadata into this shell
  mkdir -p "$RIG_ETC"
  metadata settings >"$RIG_ETC/tpu.env.new"
  mv "$RIG_ETC/tpu.env.new" "$RIG_ETC/tpu.env"
  local key value
  while IFS='=' read -r key value; do
    [[ $key =~ ^[A-Z][A-Z0-9_]*$ ]] && export "$key=$value"
  done <"$RIG_ETC/tpu.env"
}

apt_install() {
  # cloud-init may hold the lock for its first minutes.
  retry 3 10 apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@"
}

# -- the stages ----------------------------------------------------------------------------------------

stage_python() {
  export DEBIAN_FRONTEND=noninteractive
  retry 3 10 apt-get -o DPkg::Lock::Timeout=300 update -qq
  if ! command -v "$PYTHON_BIN" >/dev/null; then
    apt_install software-properties-common
    retry 3 10 add-apt-repository -y ppa:deadsnakes/ppa
  fi
  apt_install "$PYTHON_BIN" "$PYTHON_BIN-dev" "$PYTHON_BIN-venv" g++ xz-utils curl ca-certificates
  g++ --version | head -n 1
  # An environment of its own: the image's packages, an old jinja2 among them, cannot get in front.
  "$PYTHON_BIN" -m venv --clear "$RIG_HOME/venv"
  retry 3 10 "$RIG_HOME/venv/bin/python" -m pip install -q --disable-pip-version-check uv
}

stage_torch() {
  local -a spec
  # The setting is written as for a shell: words may stand in quotes.
  mapfile -t spec < <(xargs -n 1 <<<"$TORCH_PIP_SPEC")
  pip_install "${spec[@]}"
  TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$RIG_HOME/venv/bin/python" -c 'import torch; print("torch", torch.__version__)'
}

pip_install() {
  retry 3 10 "$RIG_HOME/venv/bin/uv" pip install --quiet --python "$RIG_HOME/venv/bin/python" "$@"
}

stage_rust() {
  export RUSTUP_HOME=$RIG_HOME/rustup CARGO_HOME=$RIG_HOME/cargo
  if [[ ! -x $CARGO_HOME/bin/cargo ]]; then
    curl -fsS --retry 5 https://sh.rustup.rs -o "$RIG_HOME/rustup-init.sh"
    retry 3 10 sh "$RIG_HOME/rustup-init.sh" -y -q --no-modify-path --profile minimal --default-toolchain "$RUST_TOOLCHAIN"
  fi
  "$CARGO_HOME/bin/rustc" --version
}

stage_crate() {
  local sources=$RIG_HOME/src part
  rm -rf "$sources"
  mkdir -p "$sources"
  for part in bundle-crate bundle-server; do
    metadata "$part" | base64 -d >"$RIG_HOME/$part.tar.xz"
  done
  (cd "$RIG_HOME" && cat bundle-crate.tar.xz bundle-server.tar.xz | sha256sum | cut -d' ' -f1) >"$RIG_HOME/bundle.sha256"
  if [[ $(metadata bundle-sha256) != "$(cat "$RIG_HOME/bundle.sha256")" ]]; then
    echo "expected sources with the hash $(metadata bundle-sha256), found $(cat "$RIG_HOME/bundle.sha256")"
    return 1
  fi
  tar -C "$sources" -xJf "$RIG_HOME/bundle-crate.tar.xz"
  tar -C "$sources" -xJf "$RIG_HOME/bundle-server.tar.xz"
  pip_install maturin
  export RUSTUP_HOME=$RIG_HOME/rustup CARGO_HOME=$RIG_HOME/cargo PATH="$RIG_HOME/venv/bin:$RIG_HOME/cargo/bin:$PATH"
  PYO3_PYTHON="$RIG_HOME/venv/bin/python" pip_install --no-build-isolation "$sources"
  "$CARGO_HOME/bin/rustc" --version
}

stage_weights() {
  local -a names commits
  read -ra names <<<"$CHECKPOINTS"
  read -ra commits <<<"$REVISIONS"
  local index
  for index in "${!names[@]}"; do
    HF_HOME=$RIG_STATE/hf HF_TOKEN=$(secret "${HF_TOKEN_SECRET:-}") retry 5 15 "$RIG_HOME/venv/bin/hf" download --quiet \
      "${names[index]}" --revision "${commits[index]}" --local-dir "$RIG_STATE/weights/$index"
  done
}

# The value never reaches a log: nothing here traces commands.
secret() { # secret NAME: the newest version of a Secret Manager secret; nothing without a name
  [[ -n $1 ]] || return 0
  local token project
  token=$(curl -fsS -m 10 --retry 3 -H "Metadata-Flavor: Google" \
    "http://$GCE_METADATA_HOST/computeMetadata/v1/instance/service-accounts/default/token" |
    "$RIG_HOME/venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["access_token"])')
  project=${PROJECT_ID:?}
  curl -fsS -m 20 --retry 3 -H "Authorization: Bearer $token" \
    "${SECRETMANAGER_ENDPOINT:-https://secretmanager.googleapis.com}/v1/projects/$project/secrets/$1/versions/latest:access" |
    "$RIG_HOME/venv/bin/python" -c 'import base64, json, sys
sys.stdout.buffer.write(base64.b64decode(json.load(sys.stdin)["payload"]["data"]))'
}

stage_smoke() {
  "$RIG_HOME/venv/bin/torchtpu-rs" smoke --device "${SERVE_DEVICE:-tpu}"
}

stage_unit() {
  id -u torchtpu >/dev/null 2>&1 || useradd --system --home-dir /var/lib/torchtpu-rs --shell /usr/sbin/nologin torchtpu
  (
    umask 077
    if [[ -n ${API_KEY_SECRET:-} ]]; then secret "$API_KEY_SECRET"; else metadata api-key; fi >"$RIG_ETC/api-key"
  )
  local index folders=""
  for index in $(seq 0 $(($(wc -w <<<"$CHECKPOINTS") - 1))); do folders+="$RIG_STATE/weights/$index "; done
  {
    echo "TORCHTPU_MODEL=${folders% }"
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
  install -m 0644 "$RIG_HOME/src/rig/torchtpu-rs.service" "$RIG_SYSTEMD/torchtpu-rs.service"
  systemctl daemon-reload
}

stage_serving() {
  systemctl enable torchtpu-rs.service
  systemctl restart torchtpu-rs.service
  local waited
  for ((waited = 0; waited < RIG_HEALTH_SECONDS; waited += 2)); do
    curl -fsS -m 5 -o /dev/null "http://127.0.0.1:$SERVE_PORT/health" 2>/dev/null && return 0
    if systemctl is-failed --quiet torchtpu-rs.service; then break; fi
    sleep 2
  done
  journalctl -u torchtpu-rs.service -n 20 --no-pager || true
  echo "expected the server to answer on port $SERVE_PORT within $RIG_HEALTH_SECONDS s"
  return 1
}

main() {
  mkdir -p "$RIG_STATE/boot" "$RIG_HOME" "$(dirname "$RIG_LOG")"
  trap 'failed $LINENO' ERR
  settings
  INPUTS=$(inputs)
  local name
  for name in "${STAGES[@]}"; do stage "$name"; done
  publish progress "${HISTORY}DONE"
  echo DONE
}

if [[ -z ${RIG_SOURCE_ONLY:-} ]]; then
  mkdir -p "$(dirname "$RIG_LOG")"
  exec > >(tee -a "$RIG_LOG") 2>&1
  main "$@"
fi
