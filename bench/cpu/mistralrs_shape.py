"""Dresses the bfloat16 checkpoint of `bench.e2b_shape` as mistral.rs wants it: with a vision tower and a tokenizer.

mistral.rs 0.9 loads Gemma 4 as a model of text and images only. The tower is tiny, random and never run; the text
weights are the same bytes under other names. It takes prompts as text: the word for an id
is its number.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "position_embedding_size": 64,
}


def _tower(text: dict[str, object]) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Tensors of a tiny vision tower beside a text model of this width, and their config."""
    small = {
        **text,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
    }
    config = Gemma4Config(text_config=small, vision_config=VISION, audio_config=None)
    model = Gemma4ForConditionalGeneration(config)
    tensors = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if name.startswith(("model.vision_tower.", "model.embed_vision."))
    }
    return tensors, config.to_dict()


def make(dense: Path, folder: Path) -> Path:
    """Writes the dressed form of `dense` to `folder`, unless it is whole there; returns `folder`."""
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    text = json.loads((dense / "config.json").read_text())
    tensors, config = _tower(text)
    file = "model-vision.safetensors"
    save_file(tensors, folder / file, {"format": "pt"})
    weight_map = dict.fromkeys(tensors, file)
    for shard in sorted(dense.glob("*.safetensors")):
        renamed = {
            name.replace("model.", "model.language_model.", 1): tensor
            for name, tensor in load_file(shard).items()
        }
        save_file(renamed, folder / shard.name, {"format": "pt"})
        weight_map |= dict.fromkeys(renamed, shard.name)
    config |= {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    vocab = {str(token_id): token_id for token_id in range(text["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # mistral.rs looks at the decoder to tell the kind of tokenizer; this is Gemma's.
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "2", "eos_token": "1", "pad_token": "0", "unk_token": "3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    ids = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    # Written last: its presence says that the checkpoint is whole.
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
