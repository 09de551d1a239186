from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from echo_lm.layers import Mamba2, SpectralKoopmanAttention
from echo_lm.layers.ska import LayerState, memory_of
from echo_lm.ops import SKAState, debug

DIM, HEADS, RANK, CHUNK = 12, 2, 5, 4

PAPER = {"filter": "power", "causal": "chunk", "relative_ridge": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "paper": PAPER,
    "bank in chunks": {"causal": "chunk"},
    "order 0": {"order": 0},
    "full": {"causal": False},
    "lifted": {"lift": 8},
    "lifted paper": {"lift": 8, **PAPER},
    "trace": {"causal": "chunk", "relative_ridge": "trace"},
    "fading": {"half_life": 6.0},
    "fading paper": {"half_life": 6.0, **PAPER},
    "convolved": {"conv_kernel": 4},
    "late": {"sees_itself": False},
    "late, fading, convolved": {"sees_itself": False, "half_life": [6.0, 20.0], "conv_kernel": 3},
    "convolved, all at once": {"conv_kernel": 3, "conv_silu": False, "key_norm": True, "lift": 8},
}
CAUSAL = [name for name, options in VARIANTS.items() if options.get("causal", "exact")]


def make(name: str, dtype: torch.dtype = torch.float64) -> SpectralKoopmanAttention:
    """A layer some way into its training: no parameter is where it started."""
    layer = SpectralKoopmanAttention(
        DIM, heads=HEADS, rank=RANK, chunk_size=CHUNK, **VARIANTS[name]
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def random64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def close_to_rounding(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def naive(layer: SpectralKoopmanAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The layer written out: a ridge solve for every token and head."""
    batch, time, _ = x.shape
    projected = [x @ proj.weight.T for proj in (layer.q_proj, layer.k_proj, layer.v_proj)]
    if layer.conv is not None:
        projected = [convolved(layer, z, part) for part, z in enumerate(projected)]
    q, k, v = (z.view(batch, time, HEADS, -1) for z in projected)
    if layer.lift is not None:
        q, k = (layer.lift(turned(z)) for z in (q, k))
    if layer.key_norm:
        q, k = (z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() for z in (q, k))
    mask = torch.ones(batch, time, dtype=torch.bool) if mask is None else mask
    k, v = (z * mask[..., None, None] for z in (k, v))
    if not layer.sees_itself:
        k, v = (F.pad(z[:, :-1], (0, 0, 0, 0, 1, 0)) for z in (k, v))
    rows = []
    for t in range(time):
        end = {"exact": t + 1, "chunk": t // CHUNK * CHUNK, False: time}[layer.causal]
        heads = [
            answer(layer, h, q[b, t, h], *faded(layer, h, t, k[b, :end, h], v[b, :end, h]))
            for b in range(batch)
            for h in range(HEADS)
        ]
        rows.append(torch.stack(heads).view(batch, DIM))
    return layer.eta * torch.stack(rows, 1) @ layer.out_proj.weight.T


def convolved(layer: SpectralKoopmanAttention, x: Tensor, part: int) -> Tensor:
    """Each channel over the tokens up to its own; queries, keys and values one after the other."""
    conv, width = layer.conv, layer.q_proj.out_features
    assert conv is not None
    mine = slice(part * width, part * width + x.shape[-1])
    taps = conv.weight[mine, None]
    past = F.pad(x.mT, (conv.kernel_size - 1, 0))
    y = F.conv1d(past, taps, conv.bias[mine], groups=x.shape[-1]).mT
    return F.silu(y) if conv.silu else y


def faded(
    layer: SpectralKoopmanAttention, h: int, t: int, K: Tensor, V: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values as token t knows them: times the root of what c chunks have left."""
    if layer.decay is None:
        return K, V
    age = t // CHUNK - torch.arange(len(K)) // CHUNK
    root = layer.decay[h] ** (age.to(K.dtype) / 2)
    return root[:, None] * K, root[:, None] * V


def turned(x: Tensor) -> Tensor:
    width = x.shape[-1]
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequency
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.exp(1j * angles)).flatten(-2)


def answer(layer: SpectralKoopmanAttention, h: int, q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """sum_j c_j C (X M)^j X q from the keys and values that may be seen."""
    ridge = layer.ridge
    if isinstance(ridge, Tensor):
        lam = ridge[h]
    else:
        energies = torch.cat([K.new_zeros(1), K.square().sum(-1)])
        mean = layer.relative_ridge == "trace"
        lam = ridge * (energies.sum() / RANK if mean else energies.max()).clamp_min(1e-12)
    gram = K.T @ K + lam * torch.eye(RANK, dtype=K.dtype)
    lag = K[1:].T @ K[:-1]
    u = torch.linalg.solve(gram, q)
    mixed = layer.coefficients[h, 0] * u
    for c in layer.coefficients[h, 1:]:
        u = torch.linalg.solve(gram, lag @ u)
        mixed = mixed + c * u
    return V.T @ (K @ mixed)


def in_pieces(
    layer: SpectralKoopmanAttention, x: Tensor, cuts: list[int], mask: Tensor | None = None
) -> tuple[Tensor, LayerState]:
    state, out = layer.init_state(x.shape[0]), []
    for begin, end in pairwise([0, *cuts, x.shape[1]]):
        part = None if mask is None else mask[:, begin:end]
        y, state = layer(x[:, begin:end], state, mask=part)
        out.append(y)
    return torch.cat(out, 1), state


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_layer_written_out(name: str, masked: bool) -> None:
    layer, x = make(name), random64(2, 11, DIM)
    mask = torch.rand(2, 11) < 0.7 if masked else None
    close(layer(x, mask=mask)[0], naive(layer, x, mask))


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_the_layer_written_out(name: str) -> None:
    layer, x, g = make(name), random64(2, 9, DIM).requires_grad_(), random64(2, 9, DIM)
    inputs = {"x": x, **dict(layer.named_parameters())}
    wanted = torch.autograd.grad(naive(layer, x), list(inputs.values()), g)
    got = torch.autograd.grad(layer(x, return_state=False)[0], list(inputs.values()), g)
    for key, ours, theirs in zip(inputs, got, wanted, strict=True):
        assert theirs.abs().max() > 0, key
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("cuts", [[1], [3, 4, 9], list(range(1, 17))], ids=str)
def test_pieces_equal_one_pass(name: str, cuts: list[int]) -> None:
    layer, x = make(name), random64(2, 17, DIM)
    mask = torch.rand(2, 17) < 0.8
    whole, final = layer(x, mask=mask)
    pieces, state = in_pieces(layer, x, cuts, mask)
    close(pieces, whole)
    left, right = state.to_dict(), final.to_dict()
    assert left.keys() == right.keys()
    for key in left:
        if not key.endswith(("inverse", "chunk_size")):
            close(left[key], right[key])


@pytest.mark.parametrize("name", ["ours", "paper", "lifted", "fading", "convolved", "late"])
def test_gradients_flow_through_the_state(name: str) -> None:
    layer, x, g = make(name), random64(2, 13, DIM), random64(2, 13, DIM)
    parameters = list(layer.parameters())
    whole = torch.autograd.grad(layer(x)[0], parameters, g)
    for cuts in ([5, 11], list(range(1, 13))):
        pieces = torch.autograd.grad(in_pieces(layer, x, cuts)[0], parameters, g)
        for ours, theirs in zip(pieces, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", CAUSAL)
def test_ragged_rows_equal_each_row_alone(name: str) -> None:
    layer = make(name)
    lengths = torch.tensor([[6, 0, 3], [0, 2, 5], [1, 6, 6]])
    calls = [random64(3, 6, DIM) for _ in lengths] + [random64(3, 1, DIM)]
    state, outputs = layer.init_state(3), [[] for _ in range(3)]
    for x, length in zip(calls, [*lengths, None], strict=True):
        before = state
        y, state = layer(x, state, lengths=length)
        assert y.isfinite().all()
        real = [1] * 3 if length is None else length.tolist()
        for b, n in enumerate(real):
            outputs[b].append(y[b, :n])
            if n == 0:
                after, held = memory_of(state), memory_of(before)
                for key in ("gram", "lag", "value", "last_key", "count"):
                    assert torch.equal(getattr(after, key)[b], getattr(held, key)[b])
    for b in range(3):
        own = [x[b, :n] for x, n in zip(calls, [*lengths[:, b], 1], strict=True)]
        close(torch.cat(outputs[b]), layer(torch.cat(own)[None])[0][0])
    assert memory_of(state).count.tolist() == (lengths.sum(0) + 1).tolist()


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_future_moves_nothing_not_even_a_bit(name: str, dtype: torch.dtype) -> None:
    layer, x = make(name, dtype), random64(2, 23, DIM).to(dtype)
    y = layer(x)[0]
    for t in (1, 8, 21):
        other = x.clone()
        other[:, t:] = 10 * torch.randn_like(other[:, t:])
        assert torch.equal(layer(other)[0][:, :t], y[:, :t])


def test_the_full_mode_looks_ahead() -> None:
    layer, x = make("full"), random64(1, 8, DIM)
    other = x.clone()
    other[:, -1] += 1
    assert not torch.equal(layer(other)[0][:, 0], layer(x)[0][:, 0])


def test_starts_as_the_identity_of_the_residual_but_can_learn() -> None:
    layer, x = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK), torch.randn(2, 7, DIM)
    y, state = layer(x)
    assert torch.equal(y, torch.zeros_like(y))
    assert state.gram.abs().sum() > 0
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), layer.out_proj.weight)
    assert grad.abs().min() > 0


@pytest.mark.parametrize("lift", [0, 8])
def test_initial_projections(lift: int) -> None:
    layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, lift=lift)
    for proj in (layer.q_proj, layer.k_proj):
        for head in proj.weight.chunk(HEADS):
            close_to_rounding(head @ head.T, torch.eye(lift or RANK))
    bound = (6 / (2 * DIM)) ** 0.5
    assert 0.8 * bound < layer.v_proj.weight.abs().max() <= bound


def test_initial_operator_of_ours() -> None:
    layer = SpectralKoopmanAttention(DIM, heads=4, rank=RANK, order=2, eta=2.5)
    assert layer.coefficients.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]
    close_to_rounding(layer.ridge, torch.full((4,), 0.03 * RANK))
    assert layer.eta.item() == 2.5


def test_initial_operator_of_the_paper() -> None:
    layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, order=2, **PAPER)
    assert layer.ridge == 1e-3
    assert layer.eta.item() == 1.5
    close_to_rounding(layer.coefficients, torch.tensor([[0, 0, 1.05**2]] * HEADS))
    assert not hasattr(layer, "raw_ridge")
    assert not hasattr(layer, "coef")


@pytest.mark.parametrize("raw", [-50.0, 50.0])
def test_gamma_stays_between_1_and_one_and_a_half(raw: float) -> None:
    layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, order=1, filter="power")
    torch.nn.init.constant_(layer.raw_gamma, raw)
    close_to_rounding(layer.coefficients[:, 1], torch.full((HEADS,), 1.0 if raw < 0 else 1.5))


def test_a_ridge_of_ones_own() -> None:
    layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, ridge=0.7)
    close_to_rounding(layer.ridge, torch.full((HEADS,), 0.7))
    relative = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, **PAPER, ridge=0.01)
    assert relative.ridge == 0.01


@pytest.mark.parametrize("name", VARIANTS)
def test_weight_decay_spares_the_operator_alone(name: str) -> None:
    spared = {n for n, p in make(name).named_parameters() if getattr(p, "_no_weight_decay", False)}
    operator = {"eta", "raw_gamma"} if "paper" in name else {"eta", "coef", "raw_ridge"}
    operator -= {"raw_ridge"} if name == "trace" else set()
    operator |= {"raw_decay"} if "fading" in name else set()
    operator |= {"conv.bias"} if "convolved" in name else set()
    assert spared == operator


def test_forgetting_starts_with_the_half_life_and_stays_a_share() -> None:
    layer = SpectralKoopmanAttention(DIM, heads=4, rank=RANK, chunk_size=16, half_life=64)
    assert layer.decay is not None
    close_to_rounding(layer.decay, torch.full((4,), 0.5**0.25))
    turns = SpectralKoopmanAttention(DIM, heads=4, rank=RANK, chunk_size=16, half_life=[16, 32, 64])
    assert turns.decay is not None
    close_to_rounding(turns.decay, torch.tensor([0.5, 0.5**0.5, 0.5**0.25, 0.5]))
    for life in (1e-3, 1e18):
        far = SpectralKoopmanAttention(DIM, heads=4, rank=RANK, half_life=life)
        assert far.decay is not None
        close_to_rounding(far.decay, torch.full((4,), float(life > 1)))
    for raw in (-200.0, 200.0):
        torch.nn.init.constant_(layer.raw_decay, raw)
        assert ((layer.decay > 0) & (layer.decay <= 1)).all()
        layer(torch.randn(1, 40, DIM))


def test_a_token_does_not_see_itself_if_so_told() -> None:
    """Its own key and value move its answer only where it does."""
    torch.manual_seed(0)
    for sees in (True, False):
        layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, sees_itself=sees)
        torch.nn.init.normal_(layer.out_proj.weight)
        x = torch.randn(1, 6, DIM)
        y = layer(x)[0]
        torch.nn.init.normal_(layer.v_proj.weight)
        first = layer(x)[0][:, 0]
        assert torch.equal(first, torch.zeros_like(first)) != sees
        assert not torch.equal(layer(x)[0][:, 1:], y[:, 1:])


def test_not_to_see_oneself_is_to_read_in_chunks_of_one() -> None:
    """Which solves for every token anew."""
    exact = make("late")
    chunk = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, causal="chunk", chunk_size=1)
    chunk.double().load_state_dict(exact.state_dict())
    x, mask = random64(2, 17, DIM), torch.rand(2, 17) < 0.8
    close(exact(x, mask=mask)[0], chunk(x, mask=mask)[0])


def test_normed_keys_are_equally_loud() -> None:
    layer = SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, key_norm=True)
    tokens = torch.tensor([[[0.1], [1.0], [50.0]]]) * torch.randn(1, 3, DIM)
    _, state = layer(tokens)
    traces = memory_of(state).gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(traces, torch.full((1, HEADS), 3.0 * RANK), rtol=2e-3, atol=0)


@pytest.mark.parametrize("name", ["ours", "paper", "convolved", "late"])
def test_state_bytes_are_those_of_the_formula(name: str) -> None:
    layer = make(name, torch.float32)
    causal = "chunk" if name == "paper" else "exact"
    empty = layer.init_state(3)
    for time in (1, 6, 40):
        y, state = layer(torch.randn(3, time, DIM))
        assert y.shape == (3, time, DIM)
        window = {
            "convolved": 4 * 3 * (2 * HEADS * RANK + DIM),
            "late": 4 * (HEADS * RANK + DIM),
        }.get(name, 0)
        sums = SKAState.bytes_per_row(HEADS, RANK, DIM // HEADS, causal)
        assert state.nbytes == 3 * (sums + window) == 3 * layer.state_bytes
    derived = RANK * DIM // HEADS if name == "paper" else RANK**2 + 1
    assert empty.nbytes == state.nbytes - 3 * HEADS * 4 * derived


@pytest.mark.parametrize("name", ["ours", "paper", "lifted"])
def test_bf16_outside_fp32_inside(name: str) -> None:
    layer, x = make(name, torch.bfloat16), torch.randn(2, 30, DIM).bfloat16()
    y, state = layer(x)
    assert y.dtype == torch.bfloat16
    assert state.gram.dtype == layer.init_state(1).gram.dtype == torch.float32
    exact = layer.double()(x.double())[0]
    # Six roundings on the way, seen through a ridge of a few hundredths of a key's energy.
    assert (y - exact).norm() / exact.norm() < 6 * torch.finfo(torch.bfloat16).eps


def test_autocast() -> None:
    layer, x = make("ours", torch.float32), torch.randn(2, 30, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        layer(x[:, :1], state)
    assert y.dtype == torch.bfloat16
    assert state.gram.dtype == torch.float32
    wanted = layer(x)[0]
    assert (y - wanted).norm() / wanted.norm() < 6 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_and_constant_inputs_give_finite_answers_and_gradients(name: str) -> None:
    layer = make(name, torch.float32)
    for x in (torch.zeros(1, 9, DIM), torch.ones(1, 9, DIM), torch.full((1, 9, DIM), 1e-20)):
        x.requires_grad_()
        y = layer(x)[0]
        grads = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        assert all(t.isfinite().all() for t in (y, *grads))


def test_without_a_state_the_answer_is_the_same() -> None:
    layer, x = make("ours"), random64(2, 9, DIM)
    y, state = layer(x, return_state=False)
    assert state is None
    assert torch.equal(y, layer(x)[0])


@pytest.mark.parametrize("length", [1, 9])
def test_a_call_changes_no_state_in_place(length: int) -> None:
    layer = make("ours")
    _, state = layer(random64(2, 5, DIM))
    kept = state.clone()
    layer(random64(2, length, DIM), state)
    for key, entry in kept.to_dict().items():
        assert torch.equal(state.to_dict()[key], entry)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 5}, ["dim=12", "heads=5"]),
        ({"heads": 0}, ["heads=0"]),
        ({"rank": 13}, ["rank=13", "dim=12"]),
        ({"rank": 0}, ["rank=0"]),
        ({"lift": 14}, ["lift=14"]),
        ({"lift": 3}, ["3", "even"]),
        ({"filter": "none"}, ["'none'"]),
        ({"order": -1}, ["-1"]),
        ({"ridge": 0.0}, ["ridge", "0.0"]),
        ({"ridge": float("nan")}, ["ridge", "nan"]),
        ({"half_life": 0.0}, ["half_life", "0.0"]),
        ({"half_life": [8.0, -1.0]}, ["half_life", "-1.0"]),
        ({"half_life": float("inf")}, ["half_life", "inf"]),
        ({"half_life": 8.0, "causal": False}, ["half_life", "causal=False"]),
        ({"sees_itself": False, "causal": "chunk"}, ["sees_itself=False", "'chunk'"]),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        SpectralKoopmanAttention(DIM, **{"heads": HEADS, "rank": RANK} | options)
    assert all(word in str(caught.value) for word in words)


def test_a_wrong_input_or_state_is_refused() -> None:
    layer, x = make("ours"), random64(2, 3, DIM)
    _, state = layer(x)
    _, foreign = Mamba2(DIM, head_dim=8).double()(x)
    for bad, words in (
        (x[..., :5], "12"),
        (x[:, :0], "at least one token"),
        (x[0], "12"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(bad)
    with pytest.raises(ValueError, match="Mamba2State"):
        layer(x, foreign)
    with pytest.raises(ValueError, match="SKAState, but this layer continues a WindowedSKAState"):
        make("convolved")(x, state)
    with pytest.raises(ValueError, match="another model or batch"):
        layer(x[:1], state)
    with debug(), pytest.raises(ValueError, match="nan"):
        layer(torch.full_like(x, torch.nan))


def test_positions_of_lifted_keys_count_masked_tokens() -> None:
    """A masked token still takes its place: rotation must not shift what follows."""
    layer, x = make("lifted"), random64(1, 8, DIM)
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[:, 2:4] = False
    close(in_pieces(layer, x, [3, 5], mask)[0], naive(layer, x, mask))


def test_softplus_of_the_ridge_keeps_fp64() -> None:
    layer = make("ours")
    assert torch.equal(layer.ridge, F.softplus(layer.raw_ridge))


def test_a_tied_start_makes_queries_of_keys_and_changes_no_other_weight() -> None:
    apart, tied = (started(tied_start=tied) for tied in (False, True))
    assert torch.equal(tied.q_proj.weight, tied.k_proj.weight)
    assert not torch.equal(apart.q_proj.weight, apart.k_proj.weight)
    for name, weight in apart.state_dict().items():
        assert name == "q_proj.weight" or torch.equal(weight, tied.state_dict()[name])


def test_a_tied_start_holds_behind_a_convolution() -> None:
    layer = started(tied_start=True, conv_kernel=3)
    q, k, v, _ = layer.project(torch.randn(2, 7, DIM))
    assert torch.equal(q, k)
    assert bool(v.any())


def started(**options: Any) -> SpectralKoopmanAttention:
    torch.manual_seed(0)
    return SpectralKoopmanAttention(DIM, heads=HEADS, rank=RANK, **options)
