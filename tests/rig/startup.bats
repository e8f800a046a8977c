#!/usr/bin/env bats
# What startup.sh's functions do one by one. Commands of the VM are functions here that write down how they were called;
# test_startup.py runs this file, and the stages in their order.

setup() {
  unset SECRETMANAGER_API_ENDPOINT TPU_API_ENDPOINT # Google's own addresses are expected here.
  export RIG_SOURCE_ONLY=1 RIG_ROOT=$BATS_TEST_TMPDIR/root RIG_PAUSE=0
  export CALLS=$BATS_TEST_TMPDIR/calls
  export HOME_ON_VM=$RIG_ROOT/opt/torchtpu-rs
  mkdir -p "$HOME_ON_VM/src/rig" "$HOME_ON_VM/done" "$RIG_ROOT/etc/torchtpu-rs" "$RIG_ROOT/etc/systemd/system" "$RIG_ROOT/var/log"
  cp "$BATS_TEST_DIRNAME"/../../rig/*.service "$HOME_ON_VM/src/rig"
  touch "$CALLS"
  cat >"$BATS_TEST_TMPDIR/vm" <<'VM'
source "$SCRIPT"
sleep() { echo "sleep $*" >>"$CALLS"; }
systemctl() { echo "systemctl $*" >>"$CALLS"; }
useradd() { echo "useradd $*" >>"$CALLS"; }
PROJECT_ID=p PYTHON_BIN=python3.14 TORCH_PIP_SPEC=torch RUST_TOOLCHAIN=stable CHECKPOINTS="a/one b/two" REVISIONS="main v1"
SERVE_CONTEXT=8192 SERVE_STEP=compiled SERVE_DEFER_AND_FUSE=0 SERVE_SLOTS=8 SERVE_PORT=8000
PROVISIONING_MODEL=flex-start IDLE_MINUTES=0 MAX_RUN_DURATION=14400s
VM
  export SCRIPT=$BATS_TEST_DIRNAME/../../rig/startup.sh
}

# A shell that has read the script, and `commands` after it. What it printed is shown where the test fails.
vm() { # vm commands
  run bash -c 'source "$1"; eval "$2"' vm "$BATS_TEST_TMPDIR/vm" "$1"
  echo "$output"
}

# A bare `! grep` in the middle of a test would fail nothing.
lacks() { # lacks FILE PATTERN...
  local file=$1
  shift
  if grep -q "$@" "$file"; then return 1; fi
}

@test "a command that fails is tried again after a pause, and no more often than said" {
  vm 'fails() { echo try; return 3; }; retry 3 7 fails'
  [ "$status" -eq 1 ]
  [ "$(grep -c '^try$' <<<"$output")" -eq 3 ]
  [ "$(cat "$CALLS")" = $'sleep 7\nsleep 7' ]
}

@test "a command that comes right is not tried again" {
  vm 'n=0; second() { ((++n == 2)); }; retry 5 7 second; echo "$n"'
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = 2 ]
}

@test "two writes of attributes within a second are kept apart" {
  RIG_PAUSE=0.4 vm 'curl() { :; }; publish stage one; publish stage two; publish stage three'
  [ "$(cat "$CALLS")" = $'sleep 0.4\nsleep 0.4' ]
}

@test "what a stage tells is in the log and, indented and cut, in the history" {
  vm 'tell "torch 2.14.1"; tell "$(printf "%0200d" 0)"; printf "%s" "$TOLD"'
  [ "${lines[0]}" = "torch 2.14.1" ]
  [ "${lines[2]}" = "  torch 2.14.1" ]
  [ "${#lines[3]}" -eq 122 ]
}

@test "words of the pip spec may stand in quotes" {
  vm 'TORCH_PIP_SPEC="torch==2.14.1 '"'jinja2>=3.1.6'"'"
    pip_install() { printf "[%s]\n" "$@"; }; RIG_HOME=/nowhere
    tell() { :; }; stage_torch || true'
  [ "${lines[0]}" = "[torch==2.14.1]" ]
  [ "${lines[1]}" = "[jinja2>=3.1.6]" ]
}

@test "the VM's packages are those of the lock, except for what torch brought" {
  printf 'click==8.5.1\ntorch==2.14.1 ; python_version >= "3.11"\ntorchvision==1.0\n' >"$BATS_TEST_TMPDIR/pins.txt"
  mkdir -p "$HOME_ON_VM/venv/bin"
  printf '#!/bin/sh\necho torch==2.13.0\necho "-e file:///x"\n' >"$HOME_ON_VM/venv/bin/uv"
  chmod +x "$HOME_ON_VM/venv/bin/uv"
  vm "pins $BATS_TEST_TMPDIR/pins.txt"
  [ "$output" = $'torch==2.13.0\nclick==8.5.1\ntorchvision==1.0' ]
}

@test "other sources or another PyTorch are built apart, and what was built before goes" {
  vm 'rustc() { echo rustc 1; }
    mkdir "$RIG_HOME/src/rust"; echo one >"$RIG_HOME/src/rust/lib.rs"; first=$(target); [[ $(target) == "$first" ]]
    TORCH_PIP_SPEC=torch==2.13; second=$(target); [[ $second != "$first" && ! -e $first ]]
    echo two >"$RIG_HOME/src/rust/lib.rs"; [[ $(target) != "$second" && ! -e $second ]]; echo right'
  [ "$output" = right ]
}

@test "sources that did not come whole are not unpacked" {
  vm 'metadata() { case $1 in bundle-sha256) echo abc ;; *) echo x | base64 ;; esac; }; unpack "$RIG_HOME/src"'
  [ "$status" -eq 1 ]
  [[ $output == "expected sources with the hash abc, found "* ]]
  [ -e "$HOME_ON_VM/src/rig/torchtpu-rs.service" ]
}

@test "each checkpoint and revision has a folder of its own" {
  vm weights
  [ "$output" = "$HOME_ON_VM/weights/a--one@main"$'\n'"$HOME_ON_VM/weights/b--two@v1" ]
}

@test "the smoke test runs under every restriction of the service" {
  vm 'systemd-run() { printf "%s\n" "$@"; }; confined torchtpu smoke'
  for wanted in --property=ProtectSystem=strict --property=PrivateTmp=yes --property=LimitMEMLOCK=infinity \
    --property=CapabilityBoundingSet= --property=StateDirectory=torchtpu-rs --uid=torchtpu smoke; do
    grep -qxF -- "$wanted" <<<"$output"
  done
  # What is no restriction stays in the unit.
  lacks <(echo "$output") -E 'ExecStart|Type=|Watchdog|LoadCredential|WantedBy'
}

@test "the service runs as its own user where that one can use the device" {
  mkdir "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service.d"
  echo "of an older image" >"$RIG_ROOT/etc/systemd/system/torchtpu-rs.service.d/user.conf"
  vm 'confined() { echo "$1 smoke"; }; stage_smoke'
  [ "$output" = "torchtpu smoke" ]
  [ ! -e "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service.d/user.conf" ]
  grep -q "useradd --system .* torchtpu" "$CALLS"
}

@test "the service runs as root, and the log says so, where only root can use the device" {
  vm 'confined() { [[ $1 == root ]] && echo "root smoke"; }; stage_smoke; printf "%s" "$TOLD"'
  [ "$status" -eq 0 ]
  [[ ${lines[0]} == *"the service runs as root" ]]
  [ "${lines[1]}" = "root smoke" ]
  [[ $output == *"  the user torchtpu cannot use the device"* ]]
  grep -qx User=root "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service.d/user.conf"
}

@test "a device that nobody can use fails the boot, and leaves no decision" {
  vm 'confined() { return 1; }; stage_smoke; echo went on'
  [ "$status" -ne 0 ]
  [[ $output != *"went on"* ]]
  [ ! -e "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service.d/user.conf" ]
}

@test "a service that runs gives the device up before the smoke test" {
  touch "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service"
  vm 'confined() { echo "smoke" >>"$CALLS"; }; stage_smoke'
  [ "$(grep -E 'systemctl|smoke' "$CALLS")" = $'systemctl disable --now torchtpu-rs.service\nsmoke' ]
}

@test "the service's environment says what tpu.env says" {
  vm 'SERVE_WEIGHT_FORMAT=int8; stage_unit; cat "$RIG_ETC/serve.env"; echo "$HOW"'
  [ "$output" = "TORCHTPU_MODEL=$HOME_ON_VM/weights/a--one@main $HOME_ON_VM/weights/b--two@v1
TORCHTPU_SERVED_MODEL_NAME=a/one
TORCHTPU_DEVICE=tpu
TORCHTPU_CONTEXT=8192
TORCHTPU_PORT=8000
TORCHTPU_MODE=compiled
TORCHTPU_SLOTS=8
TORCHTPU_WEIGHT_FORMAT=int8
restart" ]
  cmp "$HOME_ON_VM/src/rig/torchtpu-rs.service" "$RIG_ROOT/etc/systemd/system/torchtpu-rs.service"
}

@test "the published rig's switch means fused steps" {
  vm 'SERVE_DEFER_AND_FUSE=1; stage_unit; cat "$RIG_ETC/serve.env"'
  [[ $output == *TORCHTPU_MODE=fused* ]]
}

@test "a cpu gets no option that is for a tpu" {
  vm 'SERVE_DEVICE=cpu; stage_unit; cat "$RIG_ETC/serve.env"'
  [[ $output == *TORCHTPU_DEVICE=cpu* ]]
  [[ $output != *MODE=* && $output != *SLOTS=* ]]
}

@test "flex-start without an idle time needs no keeper" {
  vm keep
  [ "$(tail -n 1 "$CALLS")" = "systemctl disable --now torchtpu-rs-keeper.service" ]
}

@test "a VM that would run for ever or idle has a keeper as soon as there is one" {
  for setting in PROVISIONING_MODEL=spot PROVISIONING_MODEL=on-demand IDLE_MINUTES=30; do
    : >"$CALLS"
    vm "$setting; metadata() { echo key; }; keep"
    [ "$(cat "$CALLS")" = $'systemctl daemon-reload\nsystemctl enable torchtpu-rs-keeper.service\nsystemctl restart torchtpu-rs-keeper.service' ]
    [ -s "$RIG_ROOT/etc/torchtpu-rs/api-key" ]
  done
}

@test "the API key is in a file that root alone reads, and another key restarts what has it" {
  vm 'metadata() { echo secret-key; }; api_key; echo "$HOW"; HOW=start; api_key; echo "$HOW"'
  [ "$output" = $'restart\nstart' ]
  [ "$(stat --format=%a "$RIG_ROOT/etc/torchtpu-rs/api-key")" = 600 ]
  [ "$(cat "$RIG_ROOT/etc/torchtpu-rs/api-key")" = secret-key ]
}

@test "without any API key the boot fails; at a later boot the one that is there stays" {
  vm 'metadata() { return 22; }; api_key; echo went on'
  [ "$status" -ne 0 ]
  [ "$output" = "expected an API key in Secret Manager or in the metadata, found none" ]
  vm 'metadata() { :; }; api_key'
  [ "$status" -ne 0 ]
  echo old >"$RIG_ROOT/etc/torchtpu-rs/api-key"
  vm 'metadata() { return 22; }; api_key; echo "$HOW"'
  [ "$status" -eq 0 ]
  [ "${lines[-1]}" = start ]
  [ "$(cat "$RIG_ROOT/etc/torchtpu-rs/api-key")" = old ]
}

@test "a secret is asked for with the VM's token, which is in no argument" {
  mkdir -p "$HOME_ON_VM/venv/bin"
  printf '#!/bin/sh\nexec %s "$@"\n' "${PYTHON_HERE:-python3}" >"$HOME_ON_VM/venv/bin/python"
  chmod +x "$HOME_ON_VM/venv/bin/python"
  vm 'curl() {
      printf "%s " "$@" >>"$CALLS"; echo >>"$CALLS"
      case $* in
      *metadata.google.internal*) echo "{\"access_token\": \"the-token\"}" ;;
      *secretmanager*) for word in "$@"; do [[ $word != @* ]] || cat "${word#@}" >>"$CALLS.header"; done
        echo "{\"payload\": {\"data\": \"$(printf hidden | base64)\"}}" ;;
      esac
    }
    secret name'
  [ "$output" = hidden ]
  grep -q "https://secretmanager.googleapis.com/v1/projects/p/secrets/name/versions/latest:access" "$CALLS"
  lacks "$CALLS" the-token
  [ "$(cat "$CALLS.header")" = "Authorization: Bearer the-token" ]
}

@test "a server that does not come up fails the boot with the end of its journal" {
  vm 'metadata() { echo key; }; RIG_HEALTH_SECONDS=4; curl() { return 7; }; journalctl() { echo its last words; }
    systemctl() { [[ $1 != is-failed ]]; }; stage_serving; echo went on'
  [ "$status" -ne 0 ]
  [ "$output" = $'its last words\nexpected the server to answer on port 8000 within 4 s' ]
}

@test "at a later boot a service that starts by itself is not started anew" {
  echo key >"$RIG_ROOT/etc/torchtpu-rs/api-key"
  vm 'metadata() { echo key; }; curl() { :; }; stage_serving'
  grep -qx "systemctl --no-block start torchtpu-rs.service" "$CALLS"
  lacks "$CALLS" restart
}

@test "a VM that Google does not end is ended by a timer from its first moment on, and flex-start by Google" {
  vm 'systemd-run() { echo "systemd-run $*" >>"$CALLS"; }; end_in_time'
  [ "$status" -eq 0 ]
  lacks "$CALLS" systemd-run
  vm 'systemd-run() { echo "systemd-run $*" >>"$CALLS"; }; PROVISIONING_MODEL=spot; end_in_time'
  [ "$status" -eq 0 ]
  grep -q -- "--unit=torchtpu-rs-end --on-active=14400s" "$CALLS"
  grep -q "end_vm end $HOME_ON_VM/startup.sh" "$CALLS"
}
