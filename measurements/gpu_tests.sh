#!/usr/bin/env bash
# setsid nohup bash gpu_tests.sh FOLDER GPU &: once large_queue.py in FOLDER has its trunk (or at once, if there is none), each
# line of FOLDER/tests$GPU.txt (pytest's arguments, -n 12 among them or not) runs on that GPU. It must have a session of its own:
# what a call of the machine leaves behind in its own is killed with it.
# FOLDER/tests/$GPU.N.log; which failed is printed also when the time is up.
set -u
cd "$1"; mkdir -p tests
while pgrep -f large_queue.py >/dev/null && ! grep -qs 'trunk: 0' progress; do sleep 2; done
export PYTHONPATH=$PWD/code:$PWD/site TIKTOKEN_CACHE_DIR=$PWD/tiktoken_cache CUDA_VISIBLE_DEVICES=$2 OMP_NUM_THREADS=1 TRITON_CACHE_DIR=$PWD/triton_tests$2
n=0
while read -r line; do
  n=$((n + 1))
  (cd code && timeout -s INT -k 20 "${LIMIT:-420}" nice python3 -m pytest -q -rfE -m gpu -p no:cacheprovider --tb=short $line >"../tests/$2.$n.log" 2>&1
   echo "$? $line: $(tail -1 "../tests/$2.$n.log")" >>../tests/summary)
done <"tests$2.txt"
