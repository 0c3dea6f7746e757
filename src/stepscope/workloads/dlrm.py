"""A small deep learning recommendation model, written as a model engineer would."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from stepscope.measure import Prepared
from stepscope.records import Benchmark, Case, Score

if TYPE_CHECKING:
    import torch

SEED = 727
DENSE_FEATURES = 13
BOTTOM = (DENSE_FEATURES, 64, 16)
TABLES, ROWS, WIDTH = 8, 1000, 16
TOP_HIDDEN = (64, 32, 1)
BATCH = 128
LEARNING_RATE = 0.01

SMALL_TRAIN = Benchmark(
    model="dlrm",
    implementation="ootb",
    mode="train",
    config="small.1dev-embed32-fp32",
    owner="recommendation",
    description="13 dense features, bottom 13-64-16, 8 tables × 1,000 rows × 16, dot interaction, top 64-32-1; SGD",
)


def make_small_case(device: str) -> Case:
    return Case(benchmark=SMALL_TRAIN, parameters={"dtype": "float32", "device": device}, batch_size=BATCH)


def build_model() -> torch.nn.Module:
    """Bottom MLP and embeddings, pairwise dot products between them, top MLP; one logit an example."""
    import torch
    from torch import nn

    def perceptron(sizes: tuple[int, ...], last: nn.Module | None = None) -> nn.Sequential:
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        return nn.Sequential(*layers[:-1], *([last] if last else []))

    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = TABLES + 1
            interactions = features * (features - 1) // 2
            self.bottom = perceptron(BOTTOM, nn.ReLU())
            self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
            self.top = perceptron((interactions + WIDTH, *TOP_HIDDEN))
            lower = torch.tril_indices(features, features, offset=-1)
            self.register_buffer("lower", lower, persistent=False)

        def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            bottom = self.bottom(dense)
            pooled = [table(indices[i]) for i, table in enumerate(self.tables)]
            features = torch.stack([bottom, *pooled], dim=1)
            products = torch.bmm(features, features.transpose(1, 2))
            lower = self.get_buffer("lower")
            crossed = products[:, lower[0], lower[1]]
            logits: torch.Tensor = self.top(torch.cat([bottom, crossed], dim=1))
            return logits.squeeze(1)

    return Dlrm()


def prepare_small(case: Case) -> Prepared:
    """One iteration is a whole training step: forward, loss, backward, optimizer."""
    import torch

    device = str(case.parameters["device"])
    batch = case.batch_size or BATCH
    torch.manual_seed(SEED)
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss_function = torch.nn.BCEWithLogitsLoss()
    dense = torch.randn(batch, DENSE_FEATURES, device=device)
    indices = torch.randint(ROWS, (TABLES, batch, 1), device=device)
    labels = (torch.rand(batch, device=device) < 0.5).float()
    losses: list[torch.Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(dense, indices), labels)
        loss.backward()
        optimizer.step()
        losses[1:] = [loss.detach()]

    def check() -> None:
        """On one fixed batch the loss must fall: a step that trains nothing is not a training step."""
        from stepscope.measure import WrongResultError

        first, last = float(losses[0]), float(losses[-1])
        if not last < first:
            raise WrongResultError(f"the loss did not fall: {first:.4f} at first, {last:.4f} at last")

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Prepared(
        body=step, score=Score(unit="ex/s", work=batch), observed={"model_parameters": parameters}, check=check
    )
