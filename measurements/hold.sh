#!/usr/bin/env bash
# hold.sh FOLDER SECONDS: wait until large_queue.py and the tests beside it are done, at most SECONDS; results into $OUT.
set -u
cd "$1"; end=$((SECONDS + $2))
for _ in $(seq 20); do pgrep -f large_queue.py >/dev/null && break; sleep .5; done
while [ $SECONDS -lt $end ] && pgrep -f 'large_queue.py|gpu_tests.sh' >/dev/null; do sleep 2; done
tar czf "$OUT/runs.tgz" --exclude='*.safetensors' --exclude='checkpoint*' --exclude=tokenizer.json progress logs $(ls -d runs tests 2>/dev/null)
nvidia-smi --query-gpu=memory.used --format=csv,noheader
cat progress tests/summary 2>/dev/null; for log in logs/*.log; do echo "== $log"; tail -c 200 "$log"; done
