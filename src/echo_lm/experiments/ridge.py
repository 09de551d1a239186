"""Where the ridge should come from: learned, from the loudest key, or from the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo_lm.experiments.ablation import ORDER_1, Ablation, Changes, apart
from echo_lm.experiments.base import Finished, Scale


class Ridge(Ablation):
    """An absolute ridge that is learned, from several starts, against shares that are fixed.

    All in chunk mode, where each is possible; the default, exact with 0.03 r, beside them.
    """

    name = "ridge"
    title = "Absolute, relative and trace ridges"
    setting = "ridge"

    def variants(self, scale: Scale) -> Mapping[str, Changes]:
        full = scale == "full"
        how: Changes = {} if full else ORDER_1
        chunked = {"causal": "chunk", "chunk_size": 64 if full else 16}
        found: dict[str, Changes] = {}
        for rank in (24, 48) if full else (24,):
            ridges: dict[str, Changes] = {
                **{
                    f"learned from {share} r": {"ridge": share * rank, **chunked}
                    for share in (0.001, 0.03, 1.0)
                },
                **{
                    f"{share} of the largest energy": relative(share, True) | chunked
                    for share in (0.001, 0.03)
                },
                **{
                    f"{share} of tr(G) over r": relative(share, "trace") | chunked
                    for share in (0.001, 0.01, 0.1)
                },
                "exact, learned from 0.03 r": {"ridge": 0.03 * rank, "causal": "exact"},
            }
            found |= {
                f"{name}, rank {rank}": {**how, **own, "rank": rank} for name, own in ridges.items()
            }
        return found

    def panels(self, done: Sequence[Finished]) -> dict[str, dict[str, list[Finished]]]:
        """One for each task and rank."""
        return apart(super().panels(done))


def relative(share: float, to: bool | str) -> dict[str, object]:
    return {"ridge": share, "relative_ridge": to}
