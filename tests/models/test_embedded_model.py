"""The embedded checkpoint as it ships: its tokenizer, its template, its layers, its corpus and its score."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from models import EMBEDDED
from models.training.corpus import make_chat
from models.training.phrasings import plain
from models.training.score import BAR, CATEGORIES, FLOOR
from models.training.tokenizer import CONTROL, STOP_IDS, TEMPLATE, Renderer
from models.training.words import Words, held

Q = '<|"|>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"]},
                "city": {"type": "string", "description": "The city"},
            },
            "required": ["city"],
        },
    },
}
WEATHER_TEXT = (
    f"<|tool>declaration:weather{{description:{Q}Get the weather{Q},parameters:{{properties:{{"
    f"city:{{description:{Q}The city{Q},type:{Q}STRING{Q}}},unit:{{enum:[{Q}C{Q},{Q}F{Q}],type:{Q}STRING{Q}}}}},"
    f"required:[{Q}city{Q}],type:{Q}OBJECT{Q}}}}}<tool|>"
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


@cache
def literal() -> Tokenizer:
    """Takes typed markers as text, as a server has to."""
    loaded = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return loaded


@cache
def renderer() -> Renderer:
    return Renderer(tokenizer())


@cache
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((EMBEDDED / "config.json").read_text())
    return loaded


def render(*messages: dict[str, Any], **variables: Any) -> str:
    return renderer().text(list(messages), **{"add_generation_prompt": True, **variables})


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*named: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(named)
    ]
    return says("assistant", None, tool_calls=made)


def test_the_folder_has_the_files_of_a_download_and_at_most_ten_megabytes() -> None:
    names = {p.name for p in EMBEDDED.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert sum(p.stat().st_size for p in EMBEDDED.iterdir()) <= 10_000_000


def test_weights_are_bf16_and_named_as_transformers_names_them() -> None:
    raw = (EMBEDDED / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    header.pop("__metadata__")
    assert {t["dtype"] for t in header.values()} == {"BF16"}
    assert "lm_head.weight" not in header
    first_shared = config()["num_hidden_layers"] - config()["num_kv_shared_layers"]
    for i in range(config()["num_hidden_layers"]):
        assert f"model.layers.{i}.self_attn.q_proj.weight" in header
        assert f"model.layers.{i}.layer_scalar" in header
        if i < first_shared:
            assert f"model.layers.{i}.self_attn.k_proj.weight" in header


def test_every_kind_of_layer_of_e2b_is_there() -> None:
    c = config()
    assert (c["architectures"], c["model_type"]) == (["Gemma4ForCausalLM"], "gemma4_text")
    shared = c["num_kv_shared_layers"]
    owners, readers = c["layer_types"][:-shared], c["layer_types"][-shared:]
    assert (
        set(owners)
        == set(readers)
        == set(c["layer_types"])
        == {"sliding_attention", "full_attention"}
    )
    assert c["layer_types"][-1] == "full_attention"
    assert c["use_double_wide_mlp"] is True
    assert c["hidden_size_per_layer_input"] > 0
    assert c["global_head_dim"] > c["head_dim"]
    assert c["final_logit_softcapping"] == 30.0
    assert c["tie_word_embeddings"] is True
    assert c["sliding_window"] <= 64
    assert set(c["rope_parameters"]) == {"sliding_attention", "full_attention"}
    assert c["vocab_size"] == c["vocab_size_per_layer_input"] == tokenizer().get_vocab_size()


def test_generation_stops_at_gemma_4s_three_ids() -> None:
    generation = json.loads((EMBEDDED / "generation_config.json").read_text())
    assert generation["eos_token_id"] == STOP_IDS == [1, 106, 50]


def test_control_tokens_stand_at_gemma_4s_ids_and_nothing_else_is_special() -> None:
    added = json.loads((EMBEDDED / "tokenizer.json").read_text())["added_tokens"]
    assert {t["id"]: t["content"] for t in added} == CONTROL
    assert all(t["special"] for t in added)
    assert [tokenizer().id_to_token(i) for i in (45, 53, 107, 362)] == ["<unused45>", "<unused53>", "<0x00>", "<0xFF>"]  # fmt: skip
    assert tokenizer().encode("1987", add_special_tokens=False).ids == [364, 372, 371, 370]


def test_encoding_adds_no_bos() -> None:
    assert (
        tokenizer().encode("hello").ids == tokenizer().encode("hello", add_special_tokens=False).ids
    )


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    # As in Gemma's own tokenizer, a typed U+2581 comes back as a space.
    ids = literal().encode(text, add_special_tokens=False).ids
    assert literal().decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
    assert all(i >= 107 for i in ids)


def test_typed_markers_can_be_encoded_as_plain_text() -> None:
    typed = 'a<turn|>\n<|turn>system<bos><unused5><|"|><|tool_call>'
    ids = literal().encode(typed, add_special_tokens=False).ids
    assert min(ids) >= 107
    assert literal().decode(ids, skip_special_tokens=False) == typed


def test_a_name_is_the_same_ids_wherever_it_stands() -> None:
    alone = tokenizer().encode("Zorbilan", add_special_tokens=False).ids
    for before, after in ((" ", "."), (Q, Q), ("\n", " "), ("(", ")")):
        ids = tokenizer().encode(before + "Zorbilan" + after, add_special_tokens=False).ids
        assert ids[1 : 1 + len(alone)] == alone


def test_a_plain_chat_renders_in_turns() -> None:
    assert render(says("user", " Hi "), says("assistant", "Hello!"), says("user", "Bye")) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello!<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
    )


def test_without_a_generation_prompt_the_last_turn_is_closed() -> None:
    text = render(says("user", "Hi"), says("assistant", "Hello!"), add_generation_prompt=False)
    assert text == "<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello!<turn|>\n"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_open_the_system_turn(role: str) -> None:
    assert render(says(role, " Be brief. "), says("user", "Hi")) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


def test_thinking_is_marked_only_when_it_is_on() -> None:
    on = render(says("system", "S"), says("user", "Hi"), enable_thinking=True)
    assert on == "<bos><|turn>system\n<|think|>\nS<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert "<|think|>" not in render(says("user", "Hi"), enable_thinking=False)


def test_thoughts_are_kept_after_the_last_question_only() -> None:
    text = render(
        says("user", "A"),
        says("assistant", "B", reasoning_content="old"),
        says("user", "C"),
        says("assistant", "D", reasoning_content="new"),
        add_generation_prompt=False,
    )
    assert text == (
        "<bos><|turn>user\nA<turn|>\n<|turn>model\nB<turn|>\n<|turn>user\nC<turn|>\n"
        "<|turn>model\n<|channel>thought\nnew\n<channel|>D<turn|>\n"
    )


def test_thoughts_left_in_a_reply_are_taken_out() -> None:
    said = "<|channel>thought\nhm\n<channel|>B"
    assert "hm" not in render(says("user", "A"), says("assistant", said), says("user", "C"))


def test_tools_are_declared_in_the_system_turn_with_sorted_keys() -> None:
    assert render(says("user", "Hi"), tools=[WEATHER]) == (
        f"<bos><|turn>system\n{WEATHER_TEXT}<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    )


def test_a_tool_without_parameters_or_description_is_declared() -> None:
    bare = {"type": "function", "function": {"name": "now"}}
    assert f"<|tool>declaration:now{{description:{Q}{Q}}}<tool|>" in render(
        says("user", "x"), tools=[bare]
    )


def test_nested_schemas_are_declared() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"xs": {"type": "array", "items": inner}}},
    }
    assert render(says("user", "x"), tools=[{"type": "function", "function": function}]).startswith(
        f"<bos><|turn>system\n<|tool>declaration:f{{description:{Q}d{Q},parameters:{{properties:{{xs:{{items:{{"
        f"properties:{{n:{{type:{Q}INTEGER{Q}}}}},required:[{Q}n{Q}],type:{Q}OBJECT{Q}}},type:{Q}ARRAY{Q}}}}},"
        f"type:{Q}OBJECT{Q}}}}}<tool|><turn|>\n"
    )


def test_a_call_and_its_result_stay_in_one_open_model_turn() -> None:
    call = calls(("weather", {"unit": "C", "city": "Oslo"}))
    text = render(
        says("user", "Weather in Oslo?"), call, says("tool", "4 C", tool_call_id="call_0")
    )
    assert text == (
        f"<bos><|turn>user\nWeather in Oslo?<turn|>\n<|turn>model\n<|tool_call>call:weather{{city:{Q}Oslo{Q},unit:{Q}C{Q}}}<tool_call|>"
        f"<|tool_response>response:weather{{value:{Q}4 C{Q}}}<tool_response|>"
    )


def test_the_answer_to_a_result_ends_the_same_turn() -> None:
    text = render(
        says("user", "W?"),
        calls(("w", {})),
        says("tool", "4 C", tool_call_id="call_0"),
        says("assistant", "It is 4 C."),
        says("user", "Thanks"),
    )
    assert text == (
        "<bos><|turn>user\nW?<turn|>\n<|turn>model\n<|tool_call>call:w{}<tool_call|>"
        f"<|tool_response>response:w{{value:{Q}4 C{Q}}}<tool_response|>It is 4 C.<turn|>\n"
        "<|turn>user\nThanks<turn|>\n<|turn>model\n"
    )


def test_two_results_in_reverse_order_follow_their_calls() -> None:
    text = render(
        says("user", "Both?"),
        calls(("weather", {"city": "Oslo"}), ("time", {"city": "Lima"})),
        says("tool", "14:30", tool_call_id="call_1"),
        says("tool", "4 C", tool_call_id="call_0"),
    )
    assert text == (
        f"<bos><|turn>user\nBoth?<turn|>\n<|turn>model\n<|tool_call>call:weather{{city:{Q}Oslo{Q}}}<tool_call|>"
        f"<|tool_call>call:time{{city:{Q}Lima{Q}}}<tool_call|>"
        f"<|tool_response>response:weather{{value:{Q}4 C{Q}}}<tool_response|>"
        f"<|tool_response>response:time{{value:{Q}14:30{Q}}}<tool_response|>"
    )


def test_an_unanswered_call_waits_for_its_result() -> None:
    text = render(says("user", "x"), calls(("w", {"n": 1})))
    assert text.endswith("<|turn>model\n<|tool_call>call:w{n:1}<tool_call|><|tool_response>")


def test_arguments_keep_their_types() -> None:
    arguments = {"s": "a", "n": 1.5, "t": True, "z": None, "l": [1, "b"], "o": {"k": "v"}}
    assert (
        f"call:f{{l:[1,{Q}b{Q}],n:1.5,o:{{k:{Q}v{Q}}},s:{Q}a{Q},t:true,z:null}}<tool_call|>"
        in render(says("user", "x"), calls(("f", arguments)))
    )


def test_a_result_given_as_a_mapping_is_spread() -> None:
    text = render(
        says("user", "x"), calls(("f", {})), says("tool", {"b": 1, "a": "t"}, tool_call_id="call_0")
    )
    assert text.endswith(f"<|tool_response>response:f{{a:{Q}t{Q},b:1}}<tool_response|>")


def test_parts_and_null_content_print_no_none() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    text = render(
        says("system", parts), says("user", parts), says("assistant", None), says("user", "x")
    )
    assert text == (
        "<bos><|turn>system\nHellothere<turn|>\n<|turn>user\nHellothere<turn|>\n<|turn>model\n<turn|>\n"
        "<|turn>user\nx<turn|>\n<|turn>model\n"
    )


def test_an_empty_list_of_calls_is_no_call() -> None:
    text = render(says("user", "a"), says("assistant", "b", tool_calls=[]), says("user", "c"))
    assert (
        text
        == "<bos><|turn>user\na<turn|>\n<|turn>model\nb<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\n"
    )


def test_the_shipped_template_is_the_one_trained_with() -> None:
    assert (EMBEDDED / "chat_template.jinja").read_text() == TEMPLATE.read_text()


def test_training_marks_what_the_model_says_and_nothing_else() -> None:
    for seed in range(60):
        chat = make_chat(random.Random(seed), score=False)
        prompt, answer = renderer().judged(chat)
        assert answer[-1] in STOP_IDS
        last = chat.messages[:-1]
        if chat.last_span == 0:
            last = chat.messages[: max(i for i, m in enumerate(last) if m["role"] == "user") + 1]
        text = render(*last, tools=chat.tools, enable_thinking=chat.thinking)
        assert prompt == tokenizer().encode(text, add_special_tokens=False).ids


def test_the_corpus_is_the_same_from_the_same_seed() -> None:
    first, second = (
        [make_chat(rng, score=False) for _ in range(50)]
        for rng in (random.Random(3), random.Random(3))
    )
    assert first == second


@pytest.mark.parametrize("score", [False, True])
def test_words_and_numbers_come_from_one_side_of_the_split(score: bool) -> None:
    words = Words(random.Random(1), score)
    for _ in range(200):
        for word in (words.name(), words.place(), words.code(), words.noun(), words.ticker()):
            assert held(word) is score
        assert held("{} {}".format(*words.numbers(99))) is score


def test_no_held_out_question_is_trained_on() -> None:
    def questions(score: bool) -> set[str]:
        rng = random.Random(11)
        chats = [make_chat(rng, score) for _ in range(800)]
        asked = {
            plain(c.messages[-2]["content"]) for c in chats if c.messages[-2]["role"] == "user"
        }
        return {q for q in asked if len(q) > 24}

    trained, scored = questions(False), questions(True)
    assert len(scored) > 250
    assert len(trained & scored) < 0.02 * len(scored)


def test_the_readme_shows_at_least_95_percent_right_and_no_category_far_below() -> None:
    readme = (Path(EMBEDDED).parent / "README.md").read_text()
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \| (\d+) \| ([\d.]+) % \|", readme, re.M)
    counts = {name: (int(right), int(asked)) for name, right, asked, _ in rows}
    whole = counts.pop("all")
    assert len(counts) == len(CATEGORIES)
    assert tuple(map(sum, zip(*counts.values(), strict=True))) == whole
    assert whole[0] >= BAR * whole[1]
    assert not {name for name, (right, asked) in counts.items() if right < FLOOR * asked}
