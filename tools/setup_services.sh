#!/usr/bin/env bash
# Installs the system services that some tests exercise for real: Slurm with munge, and Chromium.
#
# It never fails a build: what cannot be installed is named in one line, and the tests that need it
# skip with the same reason. Running it again costs a few milliseconds when everything is there.
#   STEPSCOPE_NO_SERVICES=1         install nothing
#   STEPSCOPE_SERVICES_TIMEOUT_S    limit for each apt-get call (default 300)
set -uo pipefail

timeout_s="${STEPSCOPE_SERVICES_TIMEOUT_S:-300}"

skip() {
    echo "setup_services: skipped ${1}: ${2}"
    exit 0
}

# The daemons live in /usr/sbin, which a plain user's PATH often lacks.
export PATH="${PATH}:/usr/local/sbin:/usr/sbin:/sbin"
have() {
    local command_name
    for command_name in "$@"; do
        command -v "${command_name}" >/dev/null 2>&1 || return 1
    done
}

declare -a packages=()
have srun sbatch scontrol slurmctld slurmd || packages+=(slurm-wlm)
have munged mungekey || packages+=(munge)
have chromium || have chromium-browser || have google-chrome || packages+=(chromium)
[ "${#packages[@]}" -eq 0 ] && exit 0
wanted="${packages[*]}"

[ "${STEPSCOPE_NO_SERVICES:-}" = "1" ] && skip "${wanted}" "STEPSCOPE_NO_SERVICES=1"
[ "$(id -u)" -eq 0 ] || skip "${wanted}" "not root"
have apt-get || skip "${wanted}" "no apt-get on this system"

log="$(mktemp)" || skip "${wanted}" "no temporary folder can be written"
policy=/usr/sbin/policy-rc.d
policy_is_ours=0
clean_up() {
    rm -f "${log}"
    if [ "${policy_is_ours}" -eq 1 ]; then rm -f "${policy}"; fi
}
trap clean_up EXIT

# The tests start their own daemons with their own configuration, so the packages must not start the
# system's. 101 is the answer that means "not allowed".
if [ ! -e "${policy}" ] && printf '#!/bin/sh\nexit 101\n' >"${policy}" 2>/dev/null; then
    chmod 755 "${policy}"
    policy_is_ours=1
fi

# Another installation may hold the lock for a while; waiting for it is better than giving up.
apt() {
    DEBIAN_FRONTEND=noninteractive timeout --kill-after=10 "${timeout_s}" \
        apt-get -qq -y -o DPkg::Lock::Timeout=120 -o Acquire::Retries=1 -o Acquire::http::Timeout=20 "$@" \
        >>"${log}" 2>&1
}
last_words() {
    local words
    words="$(grep -E '^(E|W):' "${log}" | tail -n 1)"
    echo "${words:-apt-get ended with ${1}; no message}"
}

apt update || skip "${wanted}" "apt-get update: $(last_words $?)"

# One at a time: a package that this release does not have must not keep the others away.
declare -a failed=()
for package in "${packages[@]}"; do
    if apt install --no-install-recommends "${package}"; then
        echo "setup_services: installed ${package}"
    else
        failed+=("${package} ($(last_words $?))")
    fi
done
[ "${#failed[@]}" -eq 0 ] || skip "${failed[*]}" "apt-get install failed"
exit 0
