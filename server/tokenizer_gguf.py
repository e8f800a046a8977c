"""A Gemma tokenizer and its chat template from the metadata of a GGUF file, which has no tokenizer.json.

Owns llama.cpp's keys (`tokenizer.ggml.*`, as its conversion/gemma.py writes them) and what they leave out: byte-pair
merges. Every error names the key. Knows no tensors and no file format: the metadata comes as a mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from server.checkpoint import CheckpointError
from server.tokenizer import Tokenizer, check_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_MODEL: Final = "tokenizer.ggml.model"
_TOKENS: Final = "tokenizer.ggml.tokens"
_TYPES: Final = "tokenizer.ggml.token_type"
_SCORES: Final = "tokenizer.ggml.scores"
_MERGES: Final = "tokenizer.ggml.merges"
_ADD_BOS: Final = "tokenizer.ggml.add_bos_token"
TEMPLATE: Final = "tokenizer.chat_template"

# llama.cpp's token types. Normal (1) and unused (5) tokens are what merges make.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_KNOWN_TYPES: Final = frozenset(range(7))

_EXPECTED: Final = {
    _TOKENS: "a text",
    _MERGES: "a text",
    _SCORES: "a number",
    _TYPES: "one of llama.cpp's token types, 0 to 6",
}

# Gemma's longest has 31; every token is cut at every place, so a length without a bound would be work without one.
_LONGEST_TOKEN: Final = 256

# transformers' names for what llama.cpp keeps as ids.
_NAMED_IDS: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "eot_token": "tokenizer.ggml.eot_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
# Gemma 3's tokenizer.json calls these special too; its SentencePiece file, from which a GGUF is made, does not.
_IMAGE_MARKERS: Final = frozenset({"<start_of_image>", "<end_of_image>"})


def tokenizer_from_metadata(metadata: Mapping[str, object], where: str) -> Tokenizer:
    """The tokenizer that a Gemma 3 or Gemma 4 file describes; `where` names the file in errors.

    Ids are those of transformers' conversion of the same file, except that text which spells a control token stays
    text, here as with a tokenizer.json.

    Raises:
        CheckpointError: a key is missing, has another form than llama.cpp writes, or describes another tokenizer.
    """
    model = metadata.get(_MODEL)
    if model not in ("llama", "gemma4"):
        raise CheckpointError(
            f"{where}: expected {_MODEL} llama (SentencePiece) or gemma4, found {model!r}"
        )
    stored = _texts(metadata, _TOKENS, where)
    # Runs of spaces are stored as they are, all other tokens with ▁ for a space.
    tokens = ["▁" * len(token) if token.strip(" ") == "" else token for token in stored]
    types = _token_types(metadata, len(tokens), where)
    _check_scores(metadata, len(tokens), where)
    vocabulary = _vocabulary(tokens, where)
    control = _control_tokens(tokens, types, is_gemma4=model == "gemma4")
    names = _names(metadata, tokens, where)
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(metadata, vocabulary, control | _byte_tokens(tokens, types), where),
            unk_token=names.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    check_kind(inner, f"{where}, {_TOKENS}")
    inner.add_special_tokens(_added(token for token in tokens if token in control))
    inner.add_tokens(
        _added(
            token
            for token, kind in zip(stored, types, strict=True)
            if kind == _USER_DEFINED and token in vocabulary and token not in control
        )
    )
    return Tokenizer(inner, names, adds_bos=_flag(metadata, _ADD_BOS, where))


def template_source(metadata: Mapping[str, object], where: str) -> str | None:
    """The chat template in the file; a base model has none.

    Raises:
        CheckpointError: it is no text.
    """
    source = metadata.get(TEMPLATE)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(
            f"{where}, {TEMPLATE}: expected a text, found {type(source).__name__}"
        )
    return source or None


def _added(contents: Iterable[str]) -> list[AddedToken]:
    # `add_special_tokens` makes its own special.
    return [AddedToken(content, normalized=False) for content in contents]


def _vocabulary(tokens: Sequence[str], where: str) -> dict[str, int]:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    odd = next((i for i, t in enumerate(tokens) if not 0 < len(t) <= _LONGEST_TOKEN), None)
    if odd is not None:
        raise CheckpointError(
            f"{where}, {_TOKENS}[{odd}]: expected 1 to {_LONGEST_TOKEN} characters, found {len(tokens[odd])}"
        )
    if len(vocabulary) < len(tokens):
        first, token = next((i, t) for i, t in enumerate(tokens) if vocabulary[t] != i)
        raise CheckpointError(
            f"{where}, {_TOKENS}: expected each token once, found {token!r} as {first} and "
            f"{vocabulary[token]}"
        )
    return vocabulary


def _control_tokens(tokens: Sequence[str], types: Sequence[int], *, is_gemma4: bool) -> set[str]:
    # For Gemma 4 llama.cpp calls the markers of channels and tool calls "user defined", to have them printed. No other
    # tokens of Gemma 4 have that type; those of Gemma 3 are line ends and HTML tags, which are text.
    kinds = {_UNKNOWN, _CONTROL, _USER_DEFINED} if is_gemma4 else {_UNKNOWN, _CONTROL}
    return {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds or (kind == _USER_DEFINED and token in _IMAGE_MARKERS)
    }


def _byte_tokens(tokens: Sequence[str], types: Sequence[int]) -> set[str]:
    return {token for token, kind in zip(tokens, types, strict=True) if kind == _BYTE}


def _merges(
    metadata: Mapping[str, object], vocabulary: Mapping[str, int], unspellable: set[str], where: str
) -> list[tuple[str, str]]:
    """Merges, best first, that neither use nor make a token which no text may become."""
    if _MERGES in metadata:
        merges = _stored_merges(_texts(metadata, _MERGES, where), vocabulary, where)
    elif metadata[_MODEL] == "gemma4":
        raise CheckpointError(f"{where}: expected {_MERGES} beside {_MODEL} gemma4, found none")
    else:
        merges = _derived_merges(vocabulary)
    return [
        (a, b)
        for a, b in merges
        if not (a in unspellable or b in unspellable or a + b in unspellable)
    ]


def _stored_merges(
    lines: Sequence[str], vocabulary: Mapping[str, int], where: str
) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(lines):
        first, space, second = line.partition(" ")
        if not space or not {first, second, first + second} <= vocabulary.keys():
            raise CheckpointError(
                f"{where}, {_MERGES}[{number}]: expected two tokens of {_TOKENS} with a space between that make a "
                f"third, found {line[:80]!r}"
            )
        merges.append((first, second))
    return merges


def _derived_merges(vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every cut of every token into two tokens, in the order of the ids, the longest first half first.

    Gemma's ids stand in the order in which its merges were learned; scores do not, since they are -1000 for tokens that
    were added by hand, such as runs of spaces. The result is tokenizer.json's own: 514,906 merges in 1.2 s.
    """
    merges = []
    for token in vocabulary:
        for cut in range(len(token) - 1, 0, -1):
            first = token[:cut]
            if first in vocabulary and token[cut:] in vocabulary:
                merges.append((first, token[cut:]))
    return merges


def _names(metadata: Mapping[str, object], tokens: Sequence[str], where: str) -> dict[str, str]:
    names = {}
    for name, key in _NAMED_IDS.items():
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{where}, {key}: expected the id of one of {len(tokens)} tokens, found {_shown(token_id)}"
            )
        names[name] = tokens[token_id]
    return names


def _token_types(metadata: Mapping[str, object], count: int, where: str) -> list[int]:
    types = _list(metadata, _TYPES, where)
    if len(types) != count:
        raise CheckpointError(
            f"{where}, {_TYPES}: expected a type for each of {count} tokens, found {len(types)}"
        )
    _check_each(types, lambda kind: type(kind) is int and kind in _KNOWN_TYPES, _TYPES, where)
    return types


def _check_scores(metadata: Mapping[str, object], count: int, where: str) -> None:
    if _SCORES not in metadata:
        return
    scores = _list(metadata, _SCORES, where)
    if len(scores) != count:
        raise CheckpointError(
            f"{where}, {_SCORES}: expected a score for each of {count} tokens, found {len(scores)}"
        )
    _check_each(scores, lambda score: type(score) in (float, int), _SCORES, where)


def _texts(metadata: Mapping[str, object], key: str, where: str) -> list[str]:
    texts = _list(metadata, key, where)
    _check_each(texts, lambda text: isinstance(text, str), key, where)
    return texts


def _check_each(
    values: Sequence[object], is_right: Callable[[object], bool], key: str, where: str
) -> None:
    wrong = next((i for i, value in enumerate(values) if not is_right(value)), None)
    if wrong is not None:
        raise CheckpointError(
            f"{where}, {key}[{wrong}]: expected {_EXPECTED[key]}, found {_shown(values[wrong])}"
        )


def _list(metadata: Mapping[str, object], key: str, where: str) -> list[Any]:
    if key not in metadata:
        raise CheckpointError(
            f"{where}: expected {key}, found no such key; was it converted whole?"
        )
    value = metadata[key]
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _shown(value)
        raise CheckpointError(f"{where}, {key}: expected a list, found {found}")
    return value


def _flag(metadata: Mapping[str, object], key: str, where: str) -> bool:
    value = metadata.get(key, True)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}, {key}: expected true or false, found {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A value from a file nobody vouches for, short enough for an error."""
    text = repr(value) if isinstance(value, int | float | str) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:80]}…"
