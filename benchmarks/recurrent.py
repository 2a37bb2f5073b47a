"""One step of a recurrent encoder-decoder's training: regard's, joeynmt's, and that of a plain loop in PyTorch.

All train on the same batches of rows of unequal lengths, padded, with the same widths, optimizer and dropout: a
bidirectional GRU reads the source, a GRU with additive alignment (joeynmt's `bahdanau`) writes the target, and source,
target and output layer share their embeddings. A step is forward, backward, clipping and a fused AdamW, in float32.
What is counted are target tokens without padding.

`torch` computes exactly what regard does: `nn.GRU` on a packed batch, and a loop over `nn.GRUCell`. joeynmt's decoder
is wired otherwise:

    query       regard: the state before the step, and a bias; joeynmt: the state after it, and none.
    GRU's input the embedding, and regard: the context vector; joeynmt: what the step before read out.
    readout     of state and context vector, and in regard of the embedding.
    dropout     of the embeddings, and regard: of what is read out; joeynmt: of what the step before read out, and of
                the state and the context vector, twice as many elements of the decoder.

The readout makes regard's model the larger one, by E² weights, 2.4% at E = 256. joeynmt's step counts how many tokens
it predicts right, 1 to 2% of its time. Each is timed as it trains, in a case without dropout too. They are compared at
weights with which both compute one function: zero for the query's projection, for what goes into the GRU besides the
embedding, and for the embedding in the readout. Then the losses must agree, and the norms of the gradient, which
for this is taken of the weights that are not zero.

Operations are those of matrix products, a multiplication and an addition counted as two, three times those of the
forward pass. With width E and vocabulary V they are 9 E² for each source token; 2 E² for each position of the source,
padding included, and for each row; and for each position of the target 20 E², 4 E for each position of its source, for
the readout 6 E², in joeynmt 4 E², and for the scores 2 E V, which regard computes where there is no padding.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from .compare import Case
from .pretraining import HARDLY
from .sides import Side, Work

TITLE = "Training step of the recurrent encoder-decoder"

# joeynmt's ids.
PAD, BOS, EOS, SPECIALS = 1, 2, 3, 4
LENGTHS = (5, 50)
# Of a recurrent layer or cell.
PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
SMALL = {"vocab_size": 8000, "hidden_size": 256, "rows": 32, "batches": 4, "dropout": 0.1}
LARGE = SMALL | {"hidden_size": 512, "rows": 64}
TINY = {"vocab_size": 100, "hidden_size": 32, "rows": 5, "batches": 2}


def _cases(name: str, work: str, parameters: dict[str, Any], **fields: Any) -> dict[str, Case]:
    return {
        f"{name}-{peer}": Case(
            f"{work}, rows of {LENGTHS[0]} to {LENGTHS[1]} tokens",
            parameters | {"peer": peer},
            units="target tokens",
            sides=("regard", peer),
            figures={"joeynmt": {"speed": 1.5}} if peer == "joeynmt" else {},
            **fields,
        )
        for peer in ("joeynmt", "torch")
    }


CASES = {
    **_cases("small", "256 wide, 32 rows", SMALL, quick=TINY),
    **_cases("small-no-dropout", "256 wide, 32 rows, without dropout", SMALL | {"dropout": 0.0}),
    **_cases("large", "512 wide, 64 rows", LARGE, warm_up=1, repetitions=7),
}


def write_inputs(parameters: dict[str, Any], folder: Path) -> None:
    """Writes our weights, those to check with, and the batches: of each the rows of sources and of targets."""
    from regard import RegardRecurrentConfig, RegardRecurrentForConditionalGeneration

    torch.manual_seed(0)
    vocabulary, width = parameters["vocab_size"], parameters["hidden_size"]
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    model = RegardRecurrentForConditionalGeneration(
        RegardRecurrentConfig(vocab_size=vocabulary, hidden_size=width, hidden_dropout_prob=0.0, **ids)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights as small as they begin would hide what a side leaves out.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder / "model")
    if parameters["peer"] == "joeynmt":
        step = model.model.decoder.step
        with torch.no_grad():
            # The state asks for nothing, no answer goes into the GRU, and the embedding is not read out.
            step.alignment.query.weight.zero_()
            step.alignment.query.bias.zero_()
            step.cells[0].weight_ih[:, width:].zero_()
            model.model.decoder.readout.weight[:, 2 * width :].zero_()
    model.save_pretrained(folder / "checked")

    shortest, longest = LENGTHS
    batches = []
    for _ in range(parameters["batches"]):
        lengths = torch.randint(shortest, longest + 1, (2, parameters["rows"])).tolist()
        sources, targets = ([torch.randint(SPECIALS, vocabulary, (length,)) for length in each] for each in lengths)
        for target in targets:
            target[-1] = EOS
        batches.append((sources, targets))
    torch.save(batches, folder / "batches.pt")


def encoder_names(rnn: str) -> dict[str, str]:
    """Our names of the encoder's weights, by those of a bidirectional layer of PyTorch's."""
    directions = {"": "forward", "_reverse": "backward"}
    return {
        f"{rnn}.{part}_l0{suffix}": f"encoder.layers.0.{direction}_rnn.{part}_l0"
        for suffix, direction in directions.items()
        for part in PARTS
    }


class RecurrentSide(Side):
    """A step of training; what differs is the model and what it is given."""

    readout = 6
    scores_padding = True

    def __init__(self, parameters: dict[str, Any], folder: Path) -> None:
        super().__init__(parameters, folder)
        self.rows = torch.load(folder / "batches.pt")
        self.batches = [self.batch(sources, targets) for sources, targets in self.rows]
        self.model = self.load("model", parameters["dropout"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(0)

    def load(self, name: str, dropout: float) -> nn.Module:
        """The model with the weights of this name, in training."""
        raise NotImplementedError

    def weights(self, name: str) -> dict[str, Tensor]:
        """Ours, by their names in `RegardRecurrentModel`."""
        from safetensors.torch import load_file

        named = load_file(self.folder / name / "model.safetensors")
        return {key.removeprefix("model."): value for key, value in named.items()}

    def batch(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """What the model is given for these rows."""
        return {
            "input_ids": pad_sequence(sources, batch_first=True, padding_value=PAD),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in sources], batch_first=True),
            "labels": pad_sequence(targets, batch_first=True, padding_value=-100),
        }

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the target tokens."""
        return model(**batch, predicted_only=True).loss

    def check(self) -> dict[str, Any]:
        """In training, with nothing dropped; the gradient's norm is that of weights that are not zero."""
        model = self.load("checked", min(self.parameters["dropout"], HARDLY))
        loss = self.loss(model, self.batches[0])
        loss.backward()
        gradients = [parameter.grad[parameter != 0] for parameter in model.parameters()]
        norm = nn.utils.get_total_norm(gradients)
        return {"loss": loss.item(), "gradient_norm": norm.item(), "tokens": self.size(0)[0]}

    def run(self, turn: int) -> Work:
        """One step."""
        turn %= len(self.batches)
        began = time.perf_counter()
        self.loss(self.model, self.batches[turn]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Work(time.perf_counter() - began, *self.size(turn))

    def size(self, number: int) -> tuple[int, float]:
        """The target tokens of a batch, and the operations that a step needs."""
        width, vocabulary = self.parameters["hidden_size"], self.parameters["vocab_size"]
        source, target = ([len(row) for row in rows] for rows in self.rows[number])
        rows, length = len(source), max(source)
        of_source = 9 * width**2 * sum(source) + 2 * width**2 * rows * (length + 1)
        positions = rows * max(target)
        of_targets = ((20 + self.readout) * width**2 + 4 * width * length) * positions
        of_scores = 2 * width * vocabulary * (positions if self.scores_padding else sum(target))
        return sum(target), 3.0 * (of_source + of_targets + of_scores)


class RegardRecurrent(RecurrentSide):
    """`RegardRecurrentForConditionalGeneration`, as `regard train recurrent` calls it."""

    scores_padding = False

    def load(self, name: str, dropout: float) -> nn.Module:
        """See `RecurrentSide`."""
        from regard import RegardRecurrentForConditionalGeneration

        model = RegardRecurrentForConditionalGeneration.from_pretrained(
            self.folder / name, hidden_dropout_prob=dropout
        )
        return model.train()


class JoeyRecurrent(RecurrentSide):
    """joeynmt's `RecurrentEncoder` and `RecurrentDecoder`, with the loss that its training computes."""

    readout = 4
    needs = ("joeynmt",)

    def load(self, name: str, dropout: float) -> nn.Module:
        """See `RecurrentSide`."""
        from types import SimpleNamespace

        from joeynmt.model import build_model
        from joeynmt.vocabulary import Vocabulary

        width = self.parameters["hidden_size"]
        specials = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "bos", "eos")}
        numbers = {"unk_id": 0, "pad_id": PAD, "bos_id": BOS, "eos_id": EOS}
        tokens = [str(number) for number in range(SPECIALS, self.parameters["vocab_size"])]
        vocabulary = Vocabulary(tokens, SimpleNamespace(**specials, **numbers, sep_token=None, lang_tags=[]))
        common = {"type": "recurrent", "rnn_type": "gru", "num_layers": 1, "dropout": dropout}
        common["embeddings"] = {"embedding_dim": width, "dropout": dropout}
        config = {
            "encoder": {**common, "hidden_size": width // 2, "bidirectional": True},
            "decoder": {**common, "hidden_size": width, "hidden_dropout": dropout, "attention": "bahdanau"},
            "tied_embeddings": True,
            "tied_softmax": True,
        }
        model = build_model(config, vocabulary, vocabulary)
        model.loss_function = ("crossentropy", 0.0)
        model.load_state_dict(self.renamed(name))
        return model.train()

    def renamed(self, name: str) -> dict[str, Tensor]:
        """Our weights by joeynmt's names, without those that it lacks."""
        ours, width = self.weights(name), self.parameters["hidden_size"]
        tables = ("src_embed.lut", "trg_embed.lut", "decoder.output_layer")
        names = {
            "decoder.bridge_layer.weight": "decoder.first_state.weight",
            "decoder.bridge_layer.bias": "decoder.first_state.bias",
            "decoder.att_vector_layer.weight": "decoder.readout.weight",
            "decoder.att_vector_layer.bias": "decoder.readout.bias",
            "decoder.attention.query_layer.weight": "decoder.step.alignment.query.weight",
            "decoder.attention.key_layer.weight": "decoder.step.alignment.key.weight",
            "decoder.attention.energy_layer.weight": "decoder.step.alignment.score.weight",
            **{f"{table}.weight": "decoder.tokens.weight" for table in tables},
            **{f"decoder.rnn.{part}_l0": f"decoder.step.cells.0.{part}" for part in PARTS},
            **encoder_names("encoder.rnn"),
        }
        theirs = {new: ours[old] for new, old in names.items()}
        theirs["decoder.att_vector_layer.weight"] = theirs["decoder.att_vector_layer.weight"][:, : 2 * width]
        return theirs

    def batch(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """What joeynmt's data loader gives, sorted as its training does."""
        from joeynmt.batch import Batch

        begin = torch.tensor([BOS])
        batch = Batch(
            src=pad_sequence(sources, batch_first=True, padding_value=PAD),
            src_length=torch.tensor([len(row) for row in sources]),
            src_prompt_mask=None,
            trg=pad_sequence([torch.cat([begin, row]) for row in targets], batch_first=True, padding_value=PAD),
            trg_prompt_mask=None,
            indices=torch.arange(len(sources)),
            device=torch.device("cpu"),
            pad_index=PAD,
            eos_index=EOS,
        )
        batch.sort_by_src_length()
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """As joeynmt's training computes it, normalized by tokens."""
        total, *_ = model(return_type="loss", **vars(batch))
        return batch.normalize(total, "tokens")


class PlainRecurrent(nn.Module):
    """What `RegardRecurrentForConditionalGeneration` computes, as one would write it down."""

    def __init__(self, vocabulary: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(width, width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.cell = nn.GRUCell(2 * width, width)
        self.readout = nn.Linear(3 * width, width)

    def forward(self, sources: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the target tokens."""
        embedded = self.dropout(self.tokens(sources))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        memory, ends = self.encoder(packed)
        memory, _ = pad_packed_sequence(memory, batch_first=True)
        state = torch.tanh(self.first_state(torch.cat([*ends], dim=-1)))
        keys, padding = self.key(memory), sources == PAD

        before = nn.functional.pad(targets[:, :-1], (1, 0), value=BOS).where(targets != PAD, PAD)
        embedded = self.dropout(self.tokens(before))
        read = []
        for token in embedded.unbind(dim=1):
            scores = self.score(torch.tanh(self.query(state).unsqueeze(1) + keys)).squeeze(-1)
            weights = scores.masked_fill(padding, -torch.inf).softmax(dim=-1)
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            state = self.cell(torch.cat([token, context], dim=-1), state)
            read.append(torch.cat([state, context, token], dim=-1))
        hidden = self.dropout(torch.tanh(self.readout(torch.stack(read, dim=1))))
        logits = nn.functional.linear(hidden, self.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


class TorchRecurrent(RecurrentSide):
    """A plain loop over PyTorch's own modules."""

    def load(self, name: str, dropout: float) -> nn.Module:
        """See `RecurrentSide`."""
        ours = self.weights(name)
        names = {
            "tokens.weight": "decoder.tokens.weight",
            **{
                f"{name}.{part}": f"decoder.{name}.{part}"
                for name in ("first_state", "readout")
                for part in ("weight", "bias")
            },
            **{f"{name}.weight": f"decoder.step.alignment.{name}.weight" for name in ("query", "key", "score")},
            "query.bias": "decoder.step.alignment.query.bias",
            **{f"cell.{part}": f"decoder.step.cells.0.{part}" for part in PARTS},
            **encoder_names("encoder"),
        }
        model = PlainRecurrent(self.parameters["vocab_size"], self.parameters["hidden_size"], dropout)
        model.load_state_dict({new: ours[old] for new, old in names.items()})
        return model.train()

    def batch(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        """See `RecurrentSide`."""
        sources_and_targets = (pad_sequence(rows, batch_first=True, padding_value=PAD) for rows in (sources, targets))
        return *sources_and_targets, torch.tensor([len(row) for row in sources])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See `RecurrentSide`."""
        sources, targets, lengths = batch
        return model(sources, lengths, targets)


SIDES = {"regard": RegardRecurrent, "joeynmt": JoeyRecurrent, "torch": TorchRecurrent}
