"""`echo-lm eval`: lm-evaluation-harness on a checkpoint, its tasks online or from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from echo_lm.data.manifest import TOKENIZER_FILE
from echo_lm.evaluate.local import local_tasks
from echo_lm.extras import need
from echo_lm.model.boxed import model_folder
from echo_lm.ops.backends import pick_device
from echo_lm.results import circumstances, writable_file, write_json
from echo_lm.settings import whole

NOT_ASKED = -1
"""What a task of several lengths says of those it was not asked for."""


@dataclass(frozen=True)
class Conditions:
    """How tasks are scored."""

    shots: int | None = None
    """Solved examples before each question; as the task says if None."""
    limit: int | None = None
    """Only so many questions of each task."""
    lengths: tuple[str, ...] = ()
    """For tasks that come in several: numbers for RULER, one name such as 4k for BABILong."""
    max_length: int = 2048
    """Longer texts are read in windows of so many tokens."""
    batch: int = 8
    dtype: str = "auto"
    """Of the weights; that of the file if "auto"."""

    def __post_init__(self) -> None:
        whole(self, "batch")
        whole(self, "max_length", least=2)
        if self.limit is not None:
            whole(self, "limit")
        if self.shots is not None:
            whole(self, "shots", least=0)
        for length in self.lengths:
            if tokens_of(length) > self.max_length:
                raise ValueError(
                    f"Texts of length {length} do not fit into max_length {self.max_length}, and "
                    "their beginning would be left out; choose a larger one."
                )


def run(
    checkpoint: Path,
    tasks: Sequence[str],
    *,
    data: Path | None,
    tokenizer: Path | None,
    separator: str,
    conditions: Conditions,
    device: str,
    out: Path | None,
    console: Console | None = None,
) -> None:
    """Score, show, write down."""
    console = console or Console()
    out = out and writable_file(out)
    taken = circumstances()
    found = score(checkpoint, tasks, data, tokenizer, separator, conditions, device)
    console.print(table_of(found["results"], found["n-samples"]))
    if out is None:
        return
    record = {
        "checkpoint": str(checkpoint),
        "lm_eval": metadata.version("lm_eval"),
        "transformers": metadata.version("transformers"),
        "from_files": data is not None,
        **asdict(conditions),
        **taken,
        "results": found["results"],
        "questions": found["n-samples"],
        "shots": found["n-shot"],
        "task_versions": found["versions"],
    }
    write_json(out, record)
    console.print(f"Written to {out}.")


def score(
    checkpoint: Path,
    tasks: Sequence[str],
    data: Path | None = None,
    tokenizer: Path | None = None,
    separator: str = "<|endoftext|>",
    conditions: Conditions | None = None,
    device: str = "cpu",
) -> Mapping[str, Any]:
    """What lm-eval says, in its own words."""
    how = conditions or Conditions()
    harness = need("lm_eval", "eval")
    known = task_manager().task_index
    check_names(tasks, known)
    folder_of_model = model_folder(checkpoint)
    coder = load_tokenizer(tokenizer or folder_of_model / TOKENIZER_FILE, separator)
    model = load(folder_of_model, coder, how, pick_device(device))
    with TemporaryDirectory() as folder:
        chosen, manager = list(tasks), task_manager()
        if data is not None:
            stock = {name: known[name].yaml_path for name in tasks}
            chosen = local_tasks(tasks, data, Path(folder), stock)
        if set(chosen) & set(tasks):
            # Some make texts of so many tokens.
            coder.save_pretrained(folder)
            wanted = {"tokenizer": folder, **spelled(how.lengths)}
            manager = need("lm_eval.tasks", "eval").TaskManager(metadata=wanted)
        try:
            return harness.simple_evaluate(
                model=model,
                tasks=chosen,
                task_manager=manager,
                num_fewshot=how.shots,
                limit=how.limit,
                log_samples=False,
            )
        except AssertionError:
            raise ValueError(
                "lm-eval does not take a question as it is; an answer of more than "
                f"{how.max_length} tokens needs a larger max_length."
            ) from None
        except ConnectionError as error:
            raise ValueError(
                f"lm-eval could not fetch its questions: {error}; with --data they come from files."
            ) from None


def tokens_of(length: str) -> int:
    """About how many a length such as 4096 or 4k stands for; 0 if it does not say."""
    number = length.removesuffix("k")
    return int(number) * (1 if number == length else 1024) if number.isdecimal() else 0


@cache
def task_manager() -> Any:
    """What lm-eval knows; it takes seconds to read all its definitions."""
    return need("lm_eval.tasks", "eval").TaskManager()


def spelled(lengths: Sequence[str]) -> dict[str, Any]:
    """As RULER reads them, numbers; or as BABILong does, the name of one."""
    if not lengths:
        return {}
    if all(length.isdigit() for length in lengths):
        return {"max_seq_lengths": [int(length) for length in lengths]}
    if len(lengths) > 1:
        raise ValueError(
            f"lengths must be numbers such as 4096, or one name such as 4k; got "
            f"{' '.join(lengths)}."
        )
    return {"max_seq_lengths": lengths[0]}


def check_names(tasks: Sequence[str], known: Mapping[str, Any]) -> None:
    if not tasks:
        raise ValueError("Name at least one task, such as --tasks hellaswag piqa.")
    for task in tasks:
        if task not in known:
            raise ValueError(f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists them.")


def load_tokenizer(path: Path, separator: str) -> Any:
    transformers = need("transformers", "hf")
    if not path.is_file():
        raise ValueError(f"There is no tokenizer {path}; give --tokenizer FILE, a tokenizer.json.")
    coder = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    if separator not in coder.get_vocab():
        raise ValueError(
            f"{path} has no token {separator!r} to stand before a text; give --separator TOKEN."
        )
    # A text without a context is read behind it.
    coder.bos_token = coder.eos_token = coder.pad_token = separator
    return coder


def load(checkpoint: Path, coder: Any, how: Conditions, device: str) -> Any:
    """The checkpoint as lm-eval takes every model of transformers."""
    import_module("echo_lm.hf")
    auto = need("transformers", "hf").AutoModelForCausalLM
    model = auto.from_pretrained(checkpoint, dtype=how.dtype).to(device).eval()
    size, most = model.config.vocab_size, len(coder)
    if most > size:
        raise ValueError(
            f"The tokenizer has {most:,} tokens, this model {size:,}: it is that of another model."
        )
    return need("lm_eval.models.huggingface", "eval").HFLM(
        pretrained=model,
        backend="causal",
        tokenizer=coder,
        batch_size=how.batch,
        max_length=how.max_length,
    )


def table_of(results: Mapping[str, Any], questions: Mapping[str, Any]) -> Table:
    """A line for each number."""
    table = Table("Task", "Metric", "Value", "±", "Questions")
    for task, numbers in results.items():
        asked = questions.get(task, {}).get("effective", "")
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or value == NOT_ASKED:
                continue
            spread = numbers.get(f"{metric}_stderr,{kind}")
            told = f"{spread:.4f}" if isinstance(spread, float) else ""
            table.add_row(task, metric, f"{value:.4f}", told, f"{asked:,}" if asked else "")
            task = asked = ""
    return table
