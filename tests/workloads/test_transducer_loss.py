"""The transducer loss against a sum over every alignment, and against finite differences; both ways to write it."""

from __future__ import annotations

import itertools
import math
import os

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from stepscope.bench.workloads.models.rnnt import fast_loss  # noqa: E402
from stepscope.bench.workloads.models.rnnt.fast_loss import Transcripts, joint_transducer_costs  # noqa: E402
from stepscope.bench.workloads.models.rnnt.ootb import (  # noqa: E402
    lattice_costs,
    pick_log_probs,
    skew,
    transducer_loss,
)


def sum_over_alignments(logits: torch.Tensor, labels: list[int]) -> float:
    """Of one utterance [frames, labels + 1, classes]: every order of its blanks and labels that ends with a blank."""
    log_probs = logits.log_softmax(-1)
    frames, said, blank = logits.shape[0], len(labels), logits.shape[-1] - 1
    scores = []
    for places in itertools.combinations(range(frames - 1 + said), said):
        t = u = 0
        score = 0.0
        for move in range(frames - 1 + said):
            if move in places:
                score += float(log_probs[t, u, labels[u]])
                u += 1
            else:
                score += float(log_probs[t, u, blank])
                t += 1
        scores.append(score + float(log_probs[t, u, blank]))
    top = max(scores)
    return -top - math.log(math.fsum(math.exp(one - top) for one in scores))


def make_joint(
    seed: int, batch: int, frames: int, said: int, classes: int, *, width: int = 3
) -> dict[str, torch.Tensor]:
    """What the joint takes; two classes at least, of which the last is the blank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "encoded": draw(batch, frames, width),
        "predicted": draw(batch, said + 1, width),
        "weight": draw(classes, width),
        "bias": draw(classes),
    }


def make_transcripts(seed: int, frames: list[int], said: list[int], classes: int) -> Transcripts:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (len(frames), max(said)), generator=generator)
    return Transcripts(labels, torch.tensor(frames), torch.tensor(said))


def plain_costs(joint: dict[str, torch.Tensor], transcripts: Transcripts) -> torch.Tensor:
    hidden = torch.relu(joint["encoded"][:, :, None] + joint["predicted"][:, None])
    logits = torch.nn.functional.linear(hidden, joint["weight"], joint["bias"])
    blank, label = pick_log_probs(logits, transcripts.labels)
    return lattice_costs(blank, label, transcripts.frames, transcripts.label_lengths)


lattices = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(2, 4), st.integers(0, 10_000))


@settings(max_examples=20, deadline=None)
@given(st.lists(lattices, min_size=1, max_size=3))
def test_both_equal_the_sum_over_all_alignments(shapes: list[tuple[int, int, int, int]]) -> None:
    classes, seed = shapes[0][2], shapes[0][3]
    frames, said = [one[0] for one in shapes], [one[1] for one in shapes]
    joint = make_joint(seed, len(shapes), max(frames), max(said), classes)
    transcripts = make_transcripts(seed, frames, said, classes)
    with torch.no_grad():
        hidden = torch.relu(joint["encoded"][:, :, None] + joint["predicted"][:, None])
        logits = hidden @ joint["weight"].t() + joint["bias"]
        plain, fast = plain_costs(joint, transcripts), joint_transducer_costs(**joint, transcripts=transcripts)
    for i, (heard, spoken) in enumerate(zip(frames, said, strict=True)):
        expected = sum_over_alignments(logits[i, :heard, : spoken + 1], transcripts.labels[i, :spoken].tolist())
        assert float(plain[i]) == pytest.approx(expected, rel=1e-10)
        assert float(fast[i]) == pytest.approx(expected, rel=1e-10)


def test_gradients_agree_with_finite_differences() -> None:
    joint = make_joint(3, batch=2, frames=4, said=2, classes=4)
    transcripts = make_transcripts(3, [4, 2], [1, 2], 4)
    names = list(joint)

    def costs(*tensors: torch.Tensor) -> torch.Tensor:
        return joint_transducer_costs(**dict(zip(names, tensors, strict=True)), transcripts=transcripts)

    assert torch.autograd.gradcheck(costs, tuple(joint.values()))
    logits = torch.randn(2, 3, 3, 4, dtype=torch.float64).requires_grad_()
    lengths = torch.tensor([3, 2]), torch.tensor([2, 1])
    assert torch.autograd.gradcheck(lambda one: transducer_loss(one, transcripts.labels, *lengths), (logits,))


def test_gradients_of_both_agree_and_padding_has_none() -> None:
    transcripts = make_transcripts(5, [9, 4, 1], [6, 0, 3], 7)
    gradients = []
    for costs_of in (plain_costs, lambda joint, them: joint_transducer_costs(**joint, transcripts=them)):
        joint = make_joint(5, batch=3, frames=9, said=6, classes=7)
        (costs_of(joint, transcripts) * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
        gradients.append({name: one.grad for name, one in joint.items()})
    plain, fast = gradients
    for name, expected in plain.items():
        torch.testing.assert_close(fast[name], expected, rtol=1e-9, atol=1e-12)
    assert not fast["encoded"][1, 4:].any()
    assert not fast["predicted"][1, 1:].any()


def test_long_lattices_keep_their_gradients_in_single_precision() -> None:
    """Sums of hundreds of terms: the gradient of the ootb implementation in double precision is the measure."""
    frames, said, classes = 60, 30, 8
    transcripts = make_transcripts(7, [frames], [said], classes)
    exact, single = make_joint(7, 1, frames, said, classes), make_joint(7, 1, frames, said, classes)
    single = {name: one.detach().float().requires_grad_() for name, one in single.items()}
    plain_costs(exact, transcripts).sum().backward()
    joint_transducer_costs(**single, transcripts=transcripts).sum().backward()
    for name, one in single.items():
        expected = exact[name].grad
        assert float((one.grad - expected).norm() / expected.norm()) < 1e-5


def test_dropout_keeps_the_mean_and_its_gradient_follows_what_was_kept() -> None:
    transcripts = make_transcripts(1, [20], [10], 5)
    hidden = torch.ones(1, 20, 400)
    kept = fast_loss.hide(hidden, torch.zeros(1, 11, 400), transcripts, 0.25)
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    of_encoded, of_predicted = fast_loss.unhide(torch.ones_like(kept), kept, (1, 20, 11), transcripts, 0.25)
    assert float(of_encoded.sum()) == pytest.approx(float(kept.sum()), rel=1e-4)
    assert float(of_predicted.sum()) == pytest.approx(float(kept.sum()), rel=1e-4)


def test_a_second_way_back_finds_the_same_gradient() -> None:
    joint = make_joint(2, batch=1, frames=3, said=2, classes=4)
    costs = joint_transducer_costs(**joint, transcripts=make_transcripts(2, [3], [2], 4))
    first = torch.autograd.grad(costs.sum(), list(joint.values()), retain_graph=True)
    second = torch.autograd.grad(costs.sum(), list(joint.values()))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_skewed_cells_lie_on_their_diagonal() -> None:
    cells = torch.arange(6.0).reshape(1, 3, 2)
    skewed = skew(cells)
    assert skewed.shape == (1, 4, 2)
    assert skewed[0, :3, 0].tolist() == [0.0, 2.0, 4.0]
    assert skewed[0, 1:, 1].tolist() == [1.0, 3.0, 5.0]
    assert float(skewed[0, 0, 1]) < -1e29


@pytest.fixture
def kernel_device() -> str:
    """Where Triton's kernels can run: on a GPU, or on a CPU in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    pytest.skip("no GPU; TRITON_INTERPRET=1 would run the kernels on the CPU")


def test_kernels_of_the_loss_do_what_torch_does(kernel_device: str) -> None:
    from stepscope.bench.workloads.models.rnnt import kernels

    batch, frames, said, classes, width = 3, 7, 5, 11, 12
    transcripts = Transcripts(*(x.to(kernel_device) for x in make_transcripts(4, [7, 4, 1], [5, 2, 0], classes)))
    joint = {
        name: one.detach().float().to(kernel_device)
        for name, one in make_joint(4, batch, frames, said, classes, width=width).items()
    }
    shape = (batch, frames, said + 1)
    valid = fast_loss.valid_cells(frames, said + 1, transcripts)

    hidden = fast_loss.hide(joint["encoded"], joint["predicted"], transcripts, 0.0)
    torch.testing.assert_close(kernels.hide(joint["encoded"], joint["predicted"], transcripts, 0.0), hidden)
    logits = (hidden @ joint["weight"].t() + joint["bias"]).view(*shape, classes)
    picked = fast_loss.pick(logits, transcripts)
    for one, other in zip(kernels.pick(logits, transcripts), picked, strict=True):
        torch.testing.assert_close(one[valid], other[valid])
    lattice = fast_loss.sum_alignments(picked, transcripts)
    summed = kernels.sum_alignments(picked, transcripts)
    alpha, beta, costs = summed
    torch.testing.assert_close(costs, lattice[-1])
    # All alignments pass through each diagonal.
    passing = torch.where(valid, (alpha + beta + costs[:, None, None]).exp(), 0.0)
    blank, label, _ = lattice
    torch.testing.assert_close(passing, blank + label)

    upstream = torch.tensor([1.0, -2.0, 0.5], device=kernel_device)
    expected, got = logits.clone(), logits.clone()
    fast_loss.differentiate(expected, picked, lattice, transcripts, upstream)
    kernels.differentiate(got, picked, summed, transcripts, upstream)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    of_hidden = torch.sin(torch.arange(hidden.numel(), device=kernel_device)).view_as(hidden)
    for one, other in zip(
        kernels.unhide(of_hidden, hidden, shape, transcripts, 0.3),
        fast_loss.unhide(of_hidden, hidden, shape, transcripts, 0.3),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    kept = kernels.hide(joint["encoded"], joint["predicted"], transcripts, 0.5)
    assert bool(((kept == 0) | torch.isclose(kept, 2 * hidden)).all())
    assert 0.3 < float((kept > 0).sum() / (hidden > 0).sum()) < 0.7
