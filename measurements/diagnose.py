"""sagebwd.diagnose on a GPU: a Qwen3 of 8 layers with ordinary and with large logits, bf16."""
import time, torch, sagebwd
from transformers import Qwen3Config, Qwen3ForCausalLM
from sagebwd.integrations import transformers as ours
ours.register()
for gain in (1.0, 4.0):
    torch.manual_seed(0)
    m = Qwen3ForCausalLM(Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=32000, attn_implementation="sagebwd", use_cache=False)).to("cuda", torch.bfloat16)
    for n, p in m.named_parameters():
        if "q_norm" in n or "k_norm" in n: p.data.fill_(gain)
    x = torch.randint(0, 32000, (2, 2048), device="cuda")
    t = time.time(); d = sagebwd.diagnose(m, input_ids=x, labels=x); print(d); print(f"gain {gain}: {time.time() - t:.1f} s", flush=True)
