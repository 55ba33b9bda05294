# Two GPUs, NCCL, compiled: kernel caches that another user made, mode 0777, must stay empty.
rm -rf /tmp/torchinductor_root /tmp/chosen /tmp/foreign_run
mkdir /tmp/torchinductor_root /tmp/chosen; chmod 0777 /tmp/torchinductor_root /tmp/chosen; chown 12345 /tmp/torchinductor_root /tmp/chosen
for chosen in "" /tmp/chosen; do
  env -u TORCHINDUCTOR_CACHE_DIR -u TRITON_CACHE_DIR ${chosen:+TORCHINDUCTOR_CACHE_DIR=$chosen} HOME=/tmp/home_foreign \
  timeout 150 python3 -m torch.distributed.run --nproc-per-node 2 train.py experiment=debug attention=sagebwd hardware=gpu hardware.compile=true hardware.devices=2 steps=4 hardware.micro_batch=2 logger=files data=embedded run_dir=/tmp/foreign_run/x${#chosen} > /tmp/foreign${#chosen}.log 2>&1
  echo "chosen='$chosen' exit $? done $(ls /tmp/foreign_run/x${#chosen}/DONE 2>&1)"; grep -i "cache" /tmp/foreign${#chosen}.log | cut -c1-250 | head -4
  echo "files in foreign folders: $(find /tmp/torchinductor_root -mindepth 1 | wc -l) $(find /tmp/chosen -mindepth 1 | wc -l)"
  tail -3 /tmp/foreign${#chosen}.log | cut -c1-200
done
find / -xdev -maxdepth 4 -name '*inductor*' -newer /tmp/foreign0.log -not -path '/proc/*' 2>/dev/null | head; find /tmp/home_foreign | head -5; cp /tmp/foreign*.log $OUT/ 2>/dev/null
