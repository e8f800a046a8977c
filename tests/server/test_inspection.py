"""What can be looked at: models, the engine, tokens of a text and text of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server.live_server import SAY_HI, assert_openai_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import Live

pytest_plugins = ["tests.server.http_fixtures"]


def test_models_lists_every_name_with_the_window(serve: Callable[..., Live]) -> None:
    live = serve(served_model_name=("google/gemma-4-E2B-it", "gemma"))
    listed = live.http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["google/gemma-4-E2B-it", "gemma"]
    model = live.http.get("/v1/models/google/gemma-4-E2B-it").json()
    assert model == listed["data"][0]
    assert isinstance(model.pop("created"), int)
    assert model.pop("root") == live.settings.model[0]
    assert model == {
        "id": "google/gemma-4-E2B-it",
        "object": "model",
        "owned_by": "torchtpu_rs",
        "parent": None,
        "max_model_len": 256,
        "meta": {
            "n_ctx": 256,
            "n_vocab": 900,
            "size": 1000,
            "dtype": "bfloat16",
            "weight_format": "bfloat16",
        },
    }
    assert live.chat(model="gemma").json()["model"] == "gemma"
    assert live.chat().json()["model"] == "google/gemma-4-E2B-it"


@pytest.mark.parametrize("name", ["other", "google/other", "tiny-gemma/x"])
def test_a_model_that_is_not_served_is_404(live: Live, name: str) -> None:
    assert_openai_error(
        live.http.get(f"/v1/models/{name}"), 404, param="model", code="model_not_found"
    )


def test_the_engine_tells_versions_binding_layout_times_and_its_thread(live: Live) -> None:
    engine = live.http.get("/v1/engine").json()
    assert engine["engine_class"] == (
        "Engine — #[pyclass(unsendable)], owned by thread torchtpu-rs-engine"
    )
    assert engine["thread"]["name"] == "torchtpu-rs-engine"
    assert (engine["thread"]["alive"], type(engine["thread"]["native_id"])) == (True, int)
    assert engine["layout"] == {
        "full_rings": 3,
        "sliding_rings": 12,
        "shared_layers": 20,
        "context": 256,
    }
    assert (engine["device"], engine["dtype"]) == ("cpu", "bfloat16")
    assert {"python", "torch", "torch_tpu", "libtpu", "transformers", "rustc", "torchtpu_rs"} <= (
        engine["versions"].keys()
    )
    assert engine["build"] == {
        "torch": "2.14.1",
        "rustc": "1.95",
        "python": "3.11",
        "crate": "0.1.0",
    }
    assert engine["load_seconds"] == 0.125
    assert engine["warmup_seconds"] >= 0
    assert (engine["status"], engine["decoding"]) == ("ok", "greedy")
    assert engine["requests"] == {"running": 0, "waiting": 0, "max_queue": 64}


def test_rendering_shows_text_and_ids_without_the_engine(live: Live) -> None:
    body = {"messages": SAY_HI}
    rendered = live.http.post("/v1/chat/completions/render", json=body).json()
    assert rendered["text"].startswith("<bos>")
    assert "Say hi." in rendered["text"]
    assert rendered["token_ids"][0] == 2
    assert rendered["count"] == len(rendered["token_ids"])
    assert rendered["max_model_len"] == 256
    assert live.engine.calls == []
    live.chat()
    assert live.engine.calls[0].token_ids == tuple(rendered["token_ids"])


def test_tokenize_in_vllms_form(live: Live) -> None:
    ids = live.ids("Say hi.")
    answer = live.http.post(
        "/tokenize", json={"prompt": "Say hi.", "return_token_strs": True}
    ).json()
    assert answer["tokens"] == [2, *ids]
    assert (answer["count"], answer["max_model_len"]) == (len(ids) + 1, 256)
    assert answer["token_strs"][0] == "<bos>"
    assert len(answer["token_strs"]) == answer["count"]
    bare = live.http.post(
        "/tokenize", json={"prompt": "Say hi.", "add_special_tokens": False}
    ).json()
    assert (bare["tokens"], bare["token_strs"]) == (ids, None)
    chat = live.http.post("/v1/tokenize", json={"messages": SAY_HI}).json()
    rendered = live.http.post("/v1/chat/completions/render", json={"messages": SAY_HI}).json()
    assert chat["tokens"] == rendered["token_ids"]


def test_tokenize_in_llama_cpps_form(live: Live) -> None:
    ids = live.ids("Hi <turn|>")
    assert live.http.post("/tokenize", json={"content": "Hi", "add_special": True}).json() == {
        "tokens": [2, *live.ids("Hi")]
    }
    plain = {"content": "Hi <turn|>", "parse_special": False}
    assert live.http.post("/tokenize", json=plain).json() == {"tokens": ids}
    parsed = live.http.post("/tokenize", json={"content": "Hi <turn|>"}).json()["tokens"]
    assert parsed == [*live.ids("Hi "), 106]
    pieces = live.http.post("/tokenize", json={"content": "ü🦀", "with_pieces": True}).json()[
        "tokens"
    ]
    data = b"".join(
        bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces
    )
    assert data.decode() == "ü🦀"


def test_detokenize_goes_back(live: Live) -> None:
    ids = live.ids("naïve 🦀")
    answer = live.http.post("/detokenize", json={"tokens": ids}).json()
    assert answer == {"prompt": "naïve 🦀", "content": "naïve 🦀"}


@pytest.mark.parametrize("tokens", [[-1], [99_999_999], [1.5], "abc", None])
def test_detokenize_refuses_what_is_no_token(live: Live, tokens: object) -> None:
    response = live.http.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "content": "b"}, {"prompt": 7}, {"messages": []}]
)
def test_tokenize_refuses_what_is_no_single_text(live: Live, body: object) -> None:
    assert live.http.post("/tokenize", json=body).status_code == 400


def test_the_root_and_the_version_are_small_facts(live: Live) -> None:
    assert live.http.get("/").json() == {"name": "torchtpu-rs", "status": "ok"}
    assert isinstance(live.http.get("/version").json()["version"], str)
