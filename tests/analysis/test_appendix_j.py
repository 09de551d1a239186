"""Appendix J: gradients through head, attention, SKA and MLP, against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.functional import jacobian

from echo_lm import EchoConfig, EchoLM
from echo_lm.analysis.bounds import jacobian_bound
from echo_lm.analysis.gradients import (
    SILU_SLOPE,
    attention_jacobian,
    depth_bound,
    depth_floor,
    effective_rank,
    head_rank_bound,
    koopman_mlp_jacobian,
    koopman_rotation,
    paper_depth_bound,
    paper_jacobian_bound,
    smallest_singular_bound,
    softmax_bound,
    softmax_covariance,
)
from echo_lm.analysis.ridge import readout, ridge_readout
from echo_lm.layers import Attention, SpectralKoopmanAttention, SpectralKoopmanMLP
from echo_lm.ops import ska

from .draws import EPS
from .heads import Head, assert_near, head, heads, norm, rank_of, thorough


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def orders(order: int) -> Tensor:
    """The coefficients of the paper's filter of this order, gamma = 1."""
    return torch.eye(order + 1, dtype=torch.float64)[order]


# Proposition J.1: the LM head


@pytest.mark.parametrize(("vocabulary", "width"), [(4, 9), (9, 9), (40, 9)])
def test_proposition_j1_gradient_behind_the_head_has_at_most_its_rank(
    vocabulary: int, width: int
) -> None:
    """For any loss; for a cross-entropy one less where the vocabulary is no larger than d."""
    W = normal(vocabulary, width)
    hidden = normal(60, width).requires_grad_()
    targets = torch.randint(vocabulary, (60,))
    losses = {
        "any": ((hidden @ W.mT).sin().sum(), min(vocabulary, width)),
        "cross-entropy": (F.cross_entropy(hidden @ W.mT, targets), head_rank_bound(W)),
    }
    assert head_rank_bound(W) == min(vocabulary - 1, width)
    for loss, bound in losses.values():
        (slope,) = torch.autograd.grad(loss, hidden)
        assert rank_of(slope) == bound <= rank_of(W) <= width


def test_proposition_j1_head_of_low_rank() -> None:
    W = normal(30, 2) @ normal(2, 9)
    hidden = normal(60, 9).requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(hidden @ W.mT, torch.arange(60) % 30), hidden)
    assert rank_of(slope) == head_rank_bound(W) == rank_of(W) == 2


def test_proposition_j1_rank_d_is_what_any_gradient_of_hidden_states_has() -> None:
    """C x D matrices have rank at most D: that bound is no bottleneck, with a head or without."""
    hidden = normal(60, 9).requires_grad_()
    (slope,) = torch.autograd.grad(hidden.sin().sum(), hidden)
    assert rank_of(slope) == 9


# Proposition J.2 and Corollary J.3: softmax attention


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q[None], keys, values, scale=scale)[0]


def weights_of(sharpness: float, tokens: int, seed: int) -> Tensor:
    """Attention weights, from uniform to one that is 1 but for rounding."""
    random = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(tokens, generator=random, dtype=torch.float64)).softmax(-1)


softmaxes = st.builds(
    weights_of,
    st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 300.0]),
    st.integers(1, 12),
    st.integers(0, 2**16),
)


@given(heads)
@thorough
def test_proposition_j2_attention_jacobian_is_exact(h: Head) -> None:
    """V' S K / sqrt(d), against autograd through torch's attention; its rank and norm bounds."""
    q, scale = h.queries[0], h.keys.shape[1] ** -0.5
    J = attention_jacobian(q, h.keys, h.values, scale)
    wanted = jacobian(lambda q: attention(q, h.keys, h.values, scale), q)
    size = norm(h.values) * norm(h.keys) * scale
    assert_near(J, wanted, 100 * EPS * size * (1 + float(h.keys.norm(dim=-1).max())))
    assert norm(J) <= size / 2 + 4 * EPS * size
    tokens, rank = h.keys.shape
    assert int(torch.linalg.matrix_rank(J, atol=1e-10 * size)) <= min(
        h.values.shape[1], rank, tokens - 1
    )


@pytest.mark.parametrize(("tokens", "rank", "width"), [(1, 4, 4), (3, 6, 5), (9, 4, 6), (9, 6, 4)])
def test_proposition_j2_rank_bound_is_attained(tokens: int, rank: int, width: int) -> None:
    J = attention_jacobian(normal(rank), normal(tokens, rank), normal(tokens, width), 0.5)
    assert rank_of(J) == min(width, rank, tokens - 1)


@given(softmaxes)
@thorough
def test_proposition_j2_covariance_is_the_softmax_jacobian_of_norm_one_half_at_most(
    a: Tensor,
) -> None:
    S = softmax_covariance(a)
    logits = a.clamp_min(1e-300).log()
    assert_near(S, jacobian(lambda s: s.softmax(-1), logits), 4 * EPS)
    assert_near(S.sum(-1), torch.zeros_like(a), 4 * EPS)  # hence rank T - 1 at most
    assert norm(S) <= 0.5 + 4 * EPS


def test_proposition_j2_norm_bound_is_attained_by_two_tokens_of_equal_weight() -> None:
    a = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert_near(norm(softmax_covariance(a)), 0.5, 2 * EPS)
    keys = torch.tensor([[1.0, 0], [-1, 0]], dtype=torch.float64)
    J = attention_jacobian(torch.zeros(2).double(), keys, keys, 0.7)
    assert_near(norm(J), 0.7 * norm(keys) ** 2 / 2, 4 * EPS)


@given(softmaxes)
@thorough
def test_corollary_j3_saturation_bounds_the_covariance(a: Tensor) -> None:
    """|S| <= 2 m (1 - m) <= 2 (1 - m) and <= 1/2; it is at least half of the first, m (1 - m)."""
    m, size = a.max(), norm(softmax_covariance(a))
    rest = float(a.sum() - m)  # 1 - m, without its rounding
    sharp = float(softmax_bound(m))
    assert m * rest - 4 * EPS <= size <= sharp + 4 * EPS
    assert sharp <= min(2 * rest, 0.5) + 4 * EPS


def test_corollary_j3_query_gradient_vanishes_as_attention_saturates() -> None:
    """With the distance to one-hot, which is exponential in the length of the query."""
    q, keys, values = normal(4), normal(9, 4), normal(9, 3)
    sizes, bounds = [], []
    for sharpness in (1.0, 10.0, 100.0, 1e4):
        J = attention_jacobian(sharpness * q, keys, values, 0.5)
        m = (sharpness * 0.5 * keys @ q).softmax(-1).max()
        sizes.append(norm(J))
        bounds.append(0.5 * float(softmax_bound(m)) * norm(keys) * norm(values))
    assert all(size <= bound + EPS for size, bound in zip(sizes, bounds, strict=True))
    assert sizes[2] < 1e-6 * sizes[0]
    assert sizes[3] == 0


def test_corollary_j3_is_not_the_only_way_to_a_small_covariance() -> None:
    """Uniform attention over T tokens has |S| = 1 / T: no weight is large, and S vanishes too."""
    for tokens in (2, 10, 1000):
        a = torch.full((tokens,), 1 / tokens, dtype=torch.float64)
        assert_near(norm(softmax_covariance(a)), 1 / tokens, 1e-14)


def test_corollary_j3_is_of_the_query_path_alone() -> None:
    """One-hot attention hands the gradient to the value it found, whole."""
    values = normal(9, 3)
    q, keys = 1e4 * normal(4), normal(9, 4)
    J = jacobian(lambda v: attention(q, keys, v, 0.5), values)
    assert_near(norm(J.reshape(3, 27)), 1.0, 1e-12)


# Propositions J.4, J.5 and J.6: SKA


def ask(h: Head, q: Tensor, coef: Tensor) -> Tensor:
    """One query to `ska` with its state fixed; its own key is zero and leaves nothing behind."""
    k, v = (x[None, :, None] for x in (h.keys, h.values))
    how = {"coef": coef[None], "ridge": h.ridge, "causal": False}
    _, state = ska(k, k, v, return_state=True, **how)
    return ska(
        q[None, None, None],
        torch.zeros_like(k[:, :1]),
        torch.zeros_like(v[:, :1]),
        state=state,
        **how,
    )[0, 0, 0]


@given(heads, st.integers(0, 3), st.floats(1.0, 1.5))
@thorough
def test_proposition_j4_ska_jacobian_and_its_norm(h: Head, order: int, gamma: float) -> None:
    """eta B_v L A_w^K L^-1 is the slope of `ska`, below the paper's bound and below ours."""
    eta = 1.5
    coef = eta * gamma**order * orders(order)
    J = readout(h.sums, coef, h.ridge)
    allowed = eta * gamma**order * (order + 1) * h.rounding * h.scale
    assert_near(J, jacobian(lambda q: ask(h, q, coef), h.queries[0]), allowed)
    paper = float(paper_jacobian_bound(h.sums, h.ridge, order, eta=eta, gamma=gamma))
    assert norm(J) <= paper + allowed
    for ours in (
        jacobian_bound(coef, h.values, h.ridge, h.sums.gram),
        jacobian_bound(coef, h.values, h.ridge),
    ):
        assert norm(J) <= float(ours) + allowed


def test_proposition_j4_bound_grows_as_the_ridge_shrinks_and_the_jacobian_does_not() -> None:
    """Orthonormal keys, order 0: the bound is sqrt(1 + 1 / ridge) times too large, ours exact."""
    for ridge in (1.0, 1e-4, 1e-8):
        h = head("chain", tokens=4, rank=4, ridge=ridge)
        size = norm(readout(h.sums, orders(0), ridge))
        ratio = float(paper_jacobian_bound(h.sums, ridge, 0)) / size
        assert_near(ratio, (1 + 1 / ridge) ** 0.5, 1e-12 * ratio)
        ours = jacobian_bound(orders(0), h.values, ridge, h.sums.gram)
        assert_near(ours, size, 1e-14 * size)


def test_proposition_j4_bound_says_little_and_the_jacobian_can_vanish() -> None:
    """docs/paper-notes.md 9.6: independent keys, values linear in them, order 2; 3e5 too large."""
    sizes = []
    for tokens in (64, 16384):
        h = head(tokens=tokens, rank=24, width=32, ridge=1.0)
        h = Head(
            h.keys,
            h.keys @ h.values[:24, :24],
            h.queries,
            1e-3 * float(h.keys.square().sum(-1).max()),
        )
        sizes.append(norm(readout(h.sums, orders(2), h.ridge)))
        assert sizes[-1] <= jacobian_bound(orders(2), h.values, h.ridge, h.sums.gram)
    assert sizes[1] < 0.01 * sizes[0]
    assert paper_jacobian_bound(h.sums, h.ridge, 2) > 1e5 * sizes[1]


def ellipse(flatness: float) -> Head:
    """Keys that go round an ellipse in quarter turns, each its own value: A_w is nearly a rotation.

    The ridge is a tenth of G's smaller eigenvalue.
    """
    turns = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]], dtype=torch.float64).repeat(250, 1)
    keys = turns * torch.tensor([1.0, flatness], dtype=torch.float64)
    return Head(keys, keys, keys[:1], 50 * flatness**2)


@pytest.mark.parametrize("flatness", [1e-1, 1e-2, 1e-3])
def test_propositions_j4_and_j6_have_roots_that_are_needed(flatness: float) -> None:
    """There both bounds are within a factor of 5, and wrong without the root in them."""
    h = ellipse(flatness)
    J = torch.linalg.svdvals(readout(h.sums, orders(1), h.ridge))
    B = torch.linalg.svdvals(ridge_readout(h.sums.gram, h.sums.value, h.ridge))
    nu = torch.linalg.svdvals(h.operator)[-1]
    above = float(paper_jacobian_bound(h.sums, h.ridge, 1))
    below = float(smallest_singular_bound(h.sums, h.operator, h.ridge, 1))
    assert float(B[0]) < float(J[0]) <= above < 5 * float(J[0])
    assert below <= float(J[-1]) < 5 * below < float(B[-1] * nu)
    scaled = float(paper_jacobian_bound(h.sums, h.ridge, 1, eta=1.5, gamma=1.2))
    assert_near(scaled, 1.5 * 1.2 * above, 1e-12 * above)


def full_regime(**change: int | str | float) -> tuple[Head, Tensor]:
    """A head that meets the hypotheses of Proposition J.5 if nothing is changed."""
    h = head(**{"rank": 4, "width": 6, "tokens": 30} | change)
    return h, readout(h.sums, orders(2), h.ridge)


@pytest.mark.parametrize("ridge", [1e-6, 0.1, 1e4])
@pytest.mark.parametrize("width", [4, 7])
def test_proposition_j5_full_rank_regime(ridge: float, width: int) -> None:
    h, J = full_regime(ridge=ridge, width=width)
    assert rank_of(h.sums.value) == rank_of(h.operator) == 4
    assert rank_of(J, 1e-13) == 4
    assert bool(((J @ h.queries.mT).norm(dim=0) > 0).all())


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({"width": 3}, 3),  # P < r, and so rank(C) < r; A_w is invertible
        ({"kind": "chain", "tokens": 4}, 2),  # C has full rank; A_w is nilpotent
        ({"tokens": 3}, 2),  # T < r: as many directions as there are pairs
        ({"kind": "few directions"}, 1),
        ({"kind": "zero"}, 0),  # nothing read: the first chunk of chunk mode
    ],
)
def test_proposition_j5_needs_each_hypothesis(change: dict, rank: int) -> None:
    """Not "full-rank matrices by construction"."""
    _, J = full_regime(**change)
    assert rank_of(J) == rank


def test_proposition_j5_all_heads_of_a_layer_are_a_bottleneck() -> None:
    """H r directions of the d of the query path, 6 of 8 here; 576 of 768 in Echo-180M."""
    layer = SpectralKoopmanAttention(8, heads=2, rank=3).double()
    torch.nn.init.eye_(layer.out_proj.weight)
    x = normal(20, 8)
    k, v = (proj(x).unflatten(-1, (2, -1))[None] for proj in (layer.k_proj, layer.v_proj))

    def answer(x_t: Tensor) -> Tensor:
        q = layer.q_proj(x_t).view(1, 1, 2, 3).expand(-1, 20, -1, -1)
        y = ska(q, k, v, coef=layer.coefficients, ridge=layer.ridge, causal=False)
        return layer.out_proj(y[0, -1].flatten())

    assert rank_of(jacobian(answer, x[0])) == 6


@given(heads, st.integers(0, 3))
@thorough
def test_proposition_j6_smallest_singular_value(h: Head, order: int) -> None:
    """s_min(J) >= eta s_min(B_v) s_min(A_w)^K sqrt(ridge / (|G| + ridge)); the P-th if P < r."""
    J = readout(h.sums, 1.5 * orders(order), h.ridge)
    smallest = torch.linalg.svdvals(J)[-1]
    bound = smallest_singular_bound(h.sums, h.operator, h.ridge, order, eta=1.5)
    assert float(smallest) >= float(bound) - 1.5 * (order + 1) * h.rounding * h.scale


def test_proposition_j6_says_something_in_the_full_rank_regime() -> None:
    """And nothing outside it: with P < r a map has a null direction, whatever the P-th value is."""
    h, J = full_regime(ridge=1.0)
    bound = float(smallest_singular_bound(h.sums, h.operator, h.ridge, 2))
    assert 0 < bound <= float(torch.linalg.svdvals(J)[-1])
    shift, _ = full_regime(kind="chain", tokens=4)
    assert smallest_singular_bound(shift.sums, shift.operator, shift.ridge, 2) == 0
    h, J = full_regime(width=3)
    null = torch.linalg.svd(J).Vh[-1]
    assert smallest_singular_bound(h.sums, h.operator, h.ridge, 2) > 0
    assert float((J @ null).norm()) < 1e-14


# Propositions J.7 and J.8: the Koopman MLP


def koopman_mlp(dim: int = 5, hidden: int = 12, *, gated: bool = False) -> SpectralKoopmanMLP:
    """Eigenvalues on the circle, inside, and at zero."""
    layer = SpectralKoopmanMLP(dim, hidden=hidden, gated=gated).double()
    with torch.no_grad():
        layer.gamma.mul_(torch.linspace(0, 1, hidden // 2))
        layer.omega.mul_(torch.linspace(0, 1, hidden // 2))
    return layer


def rotation_of(layer: SpectralKoopmanMLP) -> Tensor:
    eigenvalues = layer.eigenvalues().detach()
    return koopman_rotation(eigenvalues.real, eigenvalues.imag)


def test_proposition_j7_each_block_scales_and_rotates() -> None:
    """R_i' R_i = rho_i^2 I, its eigenvalue is lambda_i, and |R| = max rho_i <= 1."""
    layer = koopman_mlp()
    eigenvalues, R = layer.eigenvalues().detach(), rotation_of(layer)
    moduli = eigenvalues.abs()
    assert_near(R.mT @ R, torch.diag(moduli.square().repeat_interleave(2)), 1e-15)
    assert_near(
        torch.linalg.svdvals(R), moduli.repeat_interleave(2).sort(descending=True).values, 1e-15
    )
    assert_near(norm(R), moduli.max(), 1e-15)
    assert norm(R) <= 1
    assert moduli[0] == 0
    u = normal(12)
    assert_near(layer._rotate(u), R @ u, 1e-15)


def test_proposition_j7_corrects_the_main_text() -> None:
    """Section 3.3 has R orthogonal; it is where every modulus is 1, and contracts where not."""
    on_circle = torch.rand(4, dtype=torch.float64)
    R = koopman_rotation(on_circle.cos(), on_circle.sin())
    assert_near(R.mT @ R, torch.eye(8).double(), 1e-15)
    assert torch.linalg.svdvals(rotation_of(koopman_mlp()))[-1] == 0


@pytest.mark.parametrize("length", [0.0, 0.1, 1.0, 30.0, 1e4])
def test_proposition_j8_koopman_mlp_jacobian(length: float) -> None:
    """W_read R Diag(SiLU'(a)) W_lift, against autograd through the layer, and its norm bound."""
    layer = koopman_mlp()
    lift, readout_, R = layer.lift_proj.weight.data, layer.out_proj.weight.data, rotation_of(layer)
    x = length * normal(5)
    J = koopman_mlp_jacobian(x, lift, R, readout_)
    assert_near(J, jacobian(layer, x), 1e-13 * norm(lift) * norm(readout_))
    assert norm(J) <= SILU_SLOPE * norm(lift) * norm(readout_)


def test_proposition_j8_constant_is_the_largest_slope_of_silu() -> None:
    x = torch.linspace(2.39, 2.41, 100001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.silu(x).sum(), x)
    assert_near(slope.max(), SILU_SLOPE, 2 * EPS)
    wide = torch.linspace(-50, 50, 100001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.silu(wide).sum(), wide)
    assert bool((slope.abs() <= SILU_SLOPE).all())


def test_proposition_j8_bound_is_attained_and_so_is_the_loss_of_rank() -> None:
    """At the steepest point of every unit with |lambda| = 1; and where SiLU' = 0 nothing passes."""
    eye, R = (
        torch.eye(2).double(),
        koopman_rotation(torch.zeros(1).double(), torch.ones(1).double()),
    )
    for place, size in ((2.39935728, SILU_SLOPE), (-1.278464542761, 0.0)):
        x = torch.full((2,), place, dtype=torch.float64)
        assert_near(norm(koopman_mlp_jacobian(x, eye, R, eye)), size, 1e-12)


def test_proposition_j8_is_not_of_the_gated_layer() -> None:
    """Two units: the gate is a second path, as steep as its weights and its input are large."""
    layer = SpectralKoopmanMLP(2, hidden=2, gated=True).double()
    with torch.no_grad():
        layer.lift_proj.weight.copy_(torch.tensor([[1.0, 0], [0, 0]]))
        layer.gate_proj.weight.copy_(torch.tensor([[0.0, 1], [0, 1]]))
        layer.out_proj.weight.copy_(torch.eye(2))
    J = jacobian(layer, torch.tensor([100.0, 0.0], dtype=torch.float64))
    assert norm(layer.lift_proj.weight) == norm(layer.out_proj.weight) == 1
    assert norm(J) > 20 * SILU_SLOPE


# Theorem J.9: depth


def stack(layers: int, size: float) -> tuple[list[Tensor], Tensor]:
    """Branch Jacobians of one norm, and the Jacobian of the stack x + J x of them."""
    branches = [
        size * torch.nn.functional.normalize(normal(6, 6), dim=(0, 1)) for _ in range(layers)
    ]
    whole = torch.eye(6).double()
    for J in branches:
        whole = whole + J @ whole
    return branches, whole


@pytest.mark.parametrize("size", [0.0, 0.05, 0.9, 3.0])
@pytest.mark.parametrize("layers", [1, 2, 8])
def test_theorem_j9_gradients_below_a_stack(layers: int, size: float) -> None:
    """The product of norms without residual; with it 1 + |J_j| from above and 1 - |J_j| below."""
    branches, whole = stack(layers, size)
    sizes = torch.tensor([norm(J) for J in branches], dtype=torch.float64)
    product = torch.eye(6).double()
    for J in branches:
        product = J @ product
    g = normal(6)
    alone, passed = (float((m.mT @ g).norm() / g.norm()) for m in (product, whole))
    assert alone <= float(paper_depth_bound(sizes)) + 1e-12
    assert float(depth_floor(sizes)) - 1e-12 <= passed <= float(depth_bound(sizes)) + 1e-12


def test_theorem_j9_leaves_the_residual_out() -> None:
    """Echo as it starts: SKA's output projections are zero, so the product is; no gradient is."""
    torch.manual_seed(1)
    model = EchoLM(EchoConfig.preset("synthetic-ska"))
    tokens = torch.randint(model.config.vocab_size, (1, 80))
    (slope,) = torch.autograd.grad(model(tokens, labels=tokens).loss, model.embedding.weight)
    silent = [m for m in model.mixers() if isinstance(m, SpectralKoopmanAttention)]
    assert silent
    assert all(float(m.out_proj.weight.detach().abs().max()) == 0 for m in silent)
    assert paper_depth_bound(torch.zeros(len(silent))) == 0
    assert float(slope.norm()) > 0
    assert depth_floor(torch.zeros(len(silent))) == depth_bound(torch.zeros(len(silent))) == 1


def test_theorem_j9_item_1_fails_for_one_token() -> None:
    """Attention to itself alone is the identity. The item has |V| |K| / 2, here 1/8."""
    x = torch.tensor([0.5], dtype=torch.float64)
    J = jacobian(lambda x: attention(x, x[None], x[None], 1.0), x)
    assert_near(J, torch.ones(1, 1).double(), EPS)
    assert float(x.square()) / 2 == 0.125


def test_theorem_j9_item_2_fails_for_one_token() -> None:
    """The only weight is 1, so the item is 0; through the real layer too, projections and all."""
    assert softmax_bound(torch.ones(1)) == 0
    layer = Attention(4, heads=1).double()
    x = normal(4)
    J = jacobian(lambda x: layer(x[None, None])[0][0, 0], x)
    assert_near(J, layer.out_proj.weight @ layer.v_proj.weight, 1e-15)


def test_theorem_j9_item_3_fails_for_one_token() -> None:
    """y = x^3 / (x^2 + ridge): keys and values triple the slope of the query's path."""
    x = torch.tensor([0.1], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)

    def branch(x: Tensor) -> Tensor:
        z = x.view(1, 1, 1, 1)
        return ska(z, z, z, coef=one, ridge=1.0).view(1)

    h = Head(x[None], x[None], x[None], 1.0)
    bound = float(paper_jacobian_bound(h.sums, 1.0, 0))
    J = float(jacobian(branch, x))
    assert_near(J, (3 * 0.1**2 + 0.1**4) / (1 + 0.1**2) ** 2, 1e-15)
    assert 2.9 * bound < J


def test_theorem_j9_a_branch_of_rank_one_throttles_nothing_beside_a_residual() -> None:
    """Section 3.2.3: "even a single low-entropy attention layer can throttle gradient flow"."""
    J = torch.outer(normal(6), normal(6)) / 6
    assert rank_of(J) == 1
    assert rank_of(torch.eye(6).double() + J) == 6
    assert effective_rank(torch.eye(6).double() + J) > 5


def test_effective_rank_is_between_one_and_the_rank() -> None:
    assert_near(effective_rank(torch.diag(torch.tensor([2.0, 2, 2, 0]))), 3.0, 1e-6)
    assert effective_rank(torch.zeros(3, 4)) == 0
    assert_near(effective_rank(torch.outer(normal(4), normal(3))), 1.0, 1e-12)
    a = normal(5, 6, 4)
    found = effective_rank(a)
    assert bool(((found >= 1) & (found <= 4)).all())
    turned = torch.linalg.qr(normal(6, 6)).Q @ a * 7.0
    assert_near(effective_rank(turned), found, 1e-12)
