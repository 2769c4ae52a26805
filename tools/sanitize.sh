#!/usr/bin/env bash
# make sanitize: native code under sanitizers, in a build of its own ($VENV/sanitize); the installed module stays as it is.
#   sanitize.sh VENV CASES: random codec cases and, from 1000 cases on, all native tests under AddressSanitizer and
#   UndefinedBehaviorSanitizer; the pool under ThreadSanitizer. Fails at any report, and shows it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "$1" && pwd) cases=$2 build=$venv/sanitize
export PATH="$venv/bin:$PATH"
python=$venv/bin/python

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DINGOT_SANITIZE=ON -DPython_EXECUTABLE="$python" >"$build.log" ||
  { cat "$build.log"; exit 1; }
cmake --build "$build" >"$build.log" || { cat "$build.log"; exit 1; }
for kind in thread address,undefined; do
  ${CXX:-g++} -std=c++20 -O1 -g1 -fsanitize=$kind -Inative tests/native/pool_stress.cc native/core/pool.cc \
    -o "$build/pool_stress.$kind" -pthread
done

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
# Leaks: the interpreter and NumPy keep memory until the process ends, which would drown ours.
# Reports go to files: a test runner swallows what processes write. UBSan goes on after a report, so that all are shown.
export ASAN_OPTIONS="detect_leaks=0:log_path=$reports/address"
export UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/undefined"
export TSAN_OPTIONS="die_after_fork=0:log_path=$reports/thread" # a forked child starts threads of its own
preload=$(${CXX:-g++} -print-file-name=libasan.so):$(${CXX:-g++} -print-file-name=libubsan.so)
status=0
run() {
  echo "== $*"
  "$@" || status=1
}

fixed=()
command -v setarch >/dev/null && setarch -R true 2>/dev/null && fixed=(setarch -R) # ThreadSanitizer of GCC 12 and 32 random bits
run "${fixed[@]}" "$build/pool_stress.thread" 2000
run "$build/pool_stress.address,undefined" 2000
run env LD_PRELOAD="$preload" "$python" tools/sanitized.py "$build" tests/native/random_codecs.py --cases "$cases"
if [ "$cases" -ge 1000 ]; then
  run env LD_PRELOAD="$preload" "$python" tools/sanitized.py "$build" -m pytest -q -p no:cacheprovider tests/unit/native
fi
for report in "$reports"/*; do
  [ -e "$report" ] || continue
  status=1
  cat "$report"
done
[ $status = 0 ] && echo "no report of AddressSanitizer, UndefinedBehaviorSanitizer or ThreadSanitizer"
exit $status
