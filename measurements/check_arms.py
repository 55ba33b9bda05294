"""Errors of dQ, dK, dV of each arm against float64, and of a sharp case; run without and with each ABLATION_DS."""
import sys, os, torch
from dataclasses import replace
from model.backends import ablation
from sagebwd import SageConfig, sage_attention
dev = "cuda" if torch.cuda.is_available() else "cpu"
dt = torch.bfloat16 if dev=="cuda" else torch.float16
torch.manual_seed(0)
B,H,N,D = (2,6,1024,64) if dev=="cuda" else (1,1,256,64)
mk=lambda s=1.:(torch.randn(B,H,N,D,device=dev)*s).to(dt)
q,k,v,g=mk(2),mk(2),mk(),mk()
# rows of very different gradient size, as in training
g=(g.float()*torch.exp(1.5*torch.randn(B,H,N,1,device=dev))).to(dt)
def exact():
    x=[t.double().requires_grad_() for t in (q,k,v)]
    o=torch.nn.functional.scaled_dot_product_attention(*x,is_causal=True); o.backward(g.double()); return [t.grad for t in x]
truth=exact()
def rel(a,b): return ((a.double()-b).norm()/b.norm()).item()
def shrink(a,b):
    r=(a.double()*b).sum(-1)/(b*b).sum(-1).clamp_min(1e-300)
    small=b.norm(dim=-1)<b.norm(dim=-1).quantile(.25)
    return r[small].mean().item(), (a.norm(dim=-1)==0).float().mean().item()
import functools
arms=dict(ablation.ARMS)
if dev=="cpu":
    import sagebwd
    ablation.sage_attention=functools.partial(sage_attention,kernels="triton")
for arm in arms:
    if arm in ablation.CHANGES and arm != os.environ.get("ABLATION_DS") or arm not in ablation.CHANGES and os.environ.get("ABLATION_DS"): continue
    att=ablation.Settings(arm=arm).build(device=torch.device(dev),dtype=dt,d_head=D,is_gqa=False).attend
    x=[t.detach().requires_grad_() for t in (q,k,v)]
    o=att(*x,is_causal=True,enable_gqa=False); o.backward(g)
    e=[rel(t.grad,b) for t,b in zip(x,truth)]
    print(f"{arm:14}", "dQ %.4f dK %.4f dV %.4f"%tuple(e), "small rows of dQ: size %.3f, zero %.3f; dK: %.3f %.3f"%(*shrink(x[0].grad,truth[0]),*shrink(x[1].grad,truth[1])), flush=True)
for name,c in (("default",SageConfig()),("paper pure",SageConfig.paper())):
    x=[t.detach().requires_grad_() for t in (q,k,v)]
    o=sage_attention(*x,is_causal=True,config=c,kernels=None if dev=="cuda" else "triton"); o.backward(g)
    print(f"{name:14}", "dQ %.4f dK %.4f dV %.4f"%tuple(rel(t.grad,b) for t,b in zip(x,truth)), "small rows of dQ: %.3f %.3f"%shrink(x[0].grad,truth[0]))
