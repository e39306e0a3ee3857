import sys, json, os, logging, time, dataclasses
logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
import torch
from quads.bench import gemm as B
torch.manual_seed(torch.seed() % 2**31)
found=[]
out=os.environ["OUT"]+"/"+sys.argv[1]+".json"
for part in sys.argv[2].split(","):
    for g in getattr(B,part)(sys.argv[3]=="1"):
        found += g
        json.dump([dataclasses.asdict(r) for r in found], open(out,"w"))
for r in found: print(r.group,"|",r.name,"|", r.us and round(r.us,2), "|", r.spread and round(r.spread,4), "|", r.gbps and round(r.gbps), r.tflops and round(r.tflops), "|", r.exact)
for b in B.bars(found): print(b.number, b.value, b.verdict)
