"""Why does a training step take so long? Record some steps, read the traces, and explain one."""

import tempfile
from pathlib import Path

import torch

import stepscope

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch, target = torch.randn(64, 256), torch.randint(0, 10, (64,))
folder = Path(tempfile.mkdtemp()) / "recording"
with stepscope.record(out=folder, steps=3) as recording:
    while not recording.is_done:
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recording.step()
traces = stepscope.read_traces(folder / "kineto")
print(f"{len(list(traces.ranks))} rank, {len(traces.timeline(0).steps)} steps recorded")
print(stepscope.explain(traces).sentence)
