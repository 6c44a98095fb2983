"""Requests to the local page as a browser on this machine sends them."""

import json
from urllib.parse import urlencode

from werkzeug.test import Client, TestResponse

from zsim_plan.page.local_page import ADDRESS, PORT, LocalPage

SMALL = {"model": "gpt2", "count": "2", "accumulate": "1", "tokens": "1B"}
HERE = {"REMOTE_ADDR": ADDRESS}
HOST = {"Host": f"{ADDRESS}:{PORT}"}

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
    }
)
"""A config.json of Hugging Face, of a small model."""


def local_client() -> Client:
    """Return a client of a new page."""
    return Client(LocalPage())


def got(client: Client, path: str, **choices: str) -> TestResponse:
    """Return the response to the small setting with `choices`."""
    address = f"{path}?{urlencode({**SMALL, **choices})}"
    return client.get(address, headers=HOST, environ_overrides=HERE)
