"""A compiled training step of a model with the shape of Qwen3-0.6B (28 layers, GQA 16:8, D 128), one GPU.

python qwen.py VARIANT OUT.json: VARIANT is cudnn, flash, sagebwd or eager-sagebwd. transformers' model, random
weights, bf16 autocast-free (bf16 weights), 2 sequences of 4,096 tokens, fused AdamW; ms is the median of 12 steps.
Processes compile side by side and take turns to be timed (a lock).
"""
import fcntl, json, statistics, sys, time
import torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

variant, out = sys.argv[1:3]
B, N = 2, 4096

def full(backend):
    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return o.transpose(1, 2).contiguous(), None
    return attend

name = "sdpa"
if variant in ("cudnn", "flash"):
    name = "plain_fa2" if variant == "flash" else "plain_cudnn"  # transformers takes "flash" for a package
    AttentionInterface.register(name, full(SDPBackend.CUDNN_ATTENTION if variant == "cudnn" else SDPBackend.FLASH_ATTENTION))
elif "sagebwd" in variant or variant == "before":
    from sagebwd.integrations import transformers as ours
    ours.register()
    name = "sagebwd"
torch.manual_seed(0)
config = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                     head_dim=128, vocab_size=151936, tie_word_embeddings=True, attn_implementation=name, use_cache=False)
model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokens = torch.randint(0, 151936, (B, N), device="cuda")
run = model if variant.startswith("eager") else torch.compile(model, dynamic=False)
def step():
    loss = run(input_ids=tokens, labels=tokens).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad(set_to_none=True)
    return loss
t = time.time(); losses = [float(step()) for _ in range(3)]; compiled = time.time() - t
breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
with open("/tmp/qwen.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    ms = []
    for i in range(16):
        torch.cuda.synchronize(); a = time.time(); loss = step(); torch.cuda.synchronize(); ms.append(1e3 * (time.time() - a))
losses.append(float(loss))
row = {"variant": variant, "ms": statistics.median(ms[4:]), "tokens_per_second": B * N / statistics.median(ms[4:]) * 1e3, "graph_breaks": breaks,
       "first_steps_s": compiled, "losses": losses, "peak_gib": torch.cuda.max_memory_allocated() / 2**30, "gpu": torch.cuda.get_device_name()}
json.dump(row, open(out, "w")); print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
