"""Makes the bundled model: `python -m models.train target`, then `python -m models.train draft`.

A phase lasts the given minutes of its threads' processor time, so that other work on the machine
does not shorten it. `--resume` continues from the last checkpoint of an interrupted phase.
"""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import torch.nn.functional as F
import transformers
import typer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from distill.student import distillation_loss, logits_of, round_weights
from distill.training import LossFn, Progress
from models.card import TrainingRecord, draft_card, target_card
from models.corpus import Corpus, read_corpus, training_stream
from models.evaluation import acceptance_figures, language_figures
from models.loop import Plan, train
from models.network import VOCAB_SIZE, draft_config, new_model, publish_model, target_config
from models.tokenizer import train_tokenizer

HERE = Path(__file__).parent
TARGET = "baton-py-6m"
DRAFT = "baton-py-6m-draft"
CONTEXTS = ((0.0, 256), (0.45, 512), (0.85, 2048))

app = typer.Typer(help=__doc__, add_completion=False)

Minutes = Annotated[float, typer.Option(help="Of each thread's processor time.")]
Out = Annotated[Path, typer.Option(help="The folder that receives the model folders.")]
Work = Annotated[Path, typer.Option(help="The folder for checkpoints.")]
Threads = Annotated[int, typer.Option(help="Threads for torch.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the batches.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]


@dataclass(frozen=True)
class Data:
    """The corpus, its tokenizer and the training ids, int64 [tokens]."""

    corpus: Corpus
    tokenizer: Tokenizer
    stream: Tensor

    def figures(self) -> dict[str, int]:
        """Sizes, for the record."""
        train, validation = self.corpus.train, self.corpus.validation
        return {
            "train_files": len(train),
            "train_bytes": sum(len(text.encode()) for text in train),
            "train_tokens_with_chat": len(self.stream),
            "validation_files": len(validation),
            "validation_bytes": sum(len(text.encode()) for text in validation),
        }


def load_data(seed: int, tokenizer_file: Path | None = None) -> Data:
    """Without `tokenizer_file`, trains the tokenizer; the same corpus gives the same one."""
    corpus = read_corpus()
    tokenizer = (
        Tokenizer.from_file(str(tokenizer_file))
        if tokenizer_file
        else train_tokenizer(corpus.train, VOCAB_SIZE)
    )
    return Data(corpus, tokenizer, training_stream(tokenizer, corpus.train, seed))


def language_loss(model: LlamaForCausalLM) -> LossFn:
    """Cross-entropy of the next id, in nats per token."""

    def loss(inputs: Tensor, expected: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model, inputs), expected.flatten())

    return torch.compile(loss, dynamic=False)


def training_record(
    model: LlamaForCausalLM, data: Data, done: Progress, plan: Plan, figures: dict[str, float]
) -> TrainingRecord:
    """The content of training.json."""
    return TrainingRecord(
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        parameters=sum(p.numel() for p in model.parameters()),
        seed=plan.seed,
        steps=done.step,
        thread_time_s=round(done.elapsed_s),
        tokens_seen=done.tokens,
        corpus=data.figures(),
        validation={name: round(value, 4) for name, value in figures.items()},
    )


@app.command()
def target(
    minutes: Minutes = 60,
    out: Out = HERE,
    work: Work = HERE / "build",
    threads: Threads = 2,
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Train the tokenizer and the target."""
    torch.set_num_threads(threads)
    data = load_data(seed)
    model = new_model(target_config(), seed)
    plan = Plan(minutes, seed, CONTEXTS, work / "target.pt")
    done = train(model, language_loss(model), data.stream, plan, resume)
    round_weights(model)
    figures = language_figures(model, data.tokenizer, data.corpus.validation)
    record = training_record(model, data, done, plan, figures)
    publish_model(out / TARGET, model, data.tokenizer, record, target_card(record))
    typer.echo(record)


@app.command()
def draft(
    minutes: Minutes = 15,
    out: Out = HERE,
    work: Work = HERE / "build",
    threads: Threads = 2,
    seed: Seed = 0,
    resume: Resume = False,
) -> None:
    """Distil the draft from the published target."""
    torch.set_num_threads(threads)
    data = load_data(seed, out / TARGET / "tokenizer.json")
    teacher = LlamaForCausalLM.from_pretrained(out / TARGET, dtype=torch.float32)
    model = new_model(draft_config(), seed)
    plan = Plan(minutes, seed, CONTEXTS, work / "draft.pt")
    loss = torch.compile(distillation_loss(teacher, model), dynamic=False)
    done = train(model, loss, data.stream, plan, resume)
    validation = data.corpus.validation
    round_weights(model)
    figures = language_figures(model, data.tokenizer, validation)
    figures |= acceptance_figures(teacher, model, data.tokenizer, validation)
    record = training_record(model, data, done, plan, figures)
    publish_model(out / DRAFT, model, data.tokenizer, record, draft_card(record))
    typer.echo(record)


if __name__ == "__main__":
    app()
