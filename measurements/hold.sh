#!/usr/bin/env bash
# hold.sh FOLDER SECONDS: wait in the foreground until large_queue.py in FOLDER and the tests beside it are done, at most
# SECONDS; then put runs without weights, logs and the tests' output into $OUT/runs.tgz and print a summary.
# After the trunk, each line of FOLDER/tests.txt (arguments of pytest -m gpu) runs on the GPU 0 beside the branches.
set -u
cd "$1"; end=$((SECONDS + $2)); mkdir -p tests
until grep -q prepared progress 2>/dev/null || ! pgrep -f large_queue.py >/dev/null || [ $SECONDS -ge $end ]; do sleep 1; done
run_tests() {
  export PYTHONPATH=$PWD/code:$PWD/site TIKTOKEN_CACHE_DIR=$PWD/tiktoken_cache CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=2
  n=0; while read -r line; do n=$((n+1))
    (cd code; timeout 400 python3 -m pytest -q -m gpu -p no:cacheprovider --tb=short $line >../tests/$n.log 2>&1; echo "$? $line: $(tail -1 ../tests/$n.log)" >>../tests/summary)
  done <tests.txt; touch tests/finished
}
while [ $SECONDS -lt $end ] && pgrep -f large_queue.py >/dev/null || { [ -e tests/started ] && ! [ -e tests/finished ] && [ $SECONDS -lt $end ]; }; do
  sleep 3
  if grep -q 'trunk: 0' progress && [ -e tests.txt ] && ! [ -e tests/started ]; then
    touch tests/started; (run_tests) & disown
  fi
done
tar czf "$OUT/runs.tgz" --exclude='*.safetensors' --exclude='checkpoint*' progress logs tests $(ls -d runs 2>/dev/null)
cat progress tests/summary 2>/dev/null; for log in logs/*.log; do echo "== $log"; tail -c 300 "$log"; done
