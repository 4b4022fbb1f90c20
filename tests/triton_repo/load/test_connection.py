"""Both protocols against a server that does as it is told: python -m pytest tests/triton_repo/load/test_connection.py"""

import asyncio
import re

import numpy as np
import pytest

from foundation.core.errors import InputError
from foundation.standalone.windows import Window
from tests.triton_repo.load.fake_server import TEXT, Fake, address, serving
from tests.triton_repo.tiny_exports import png
from triton_repo.load.arrivals import poisson
from triton_repo.load.connection import Address, Connection, Model, address_of, check_rows
from triton_repo.load.figures import tiers as line_of_tiers
from triton_repo.load.generator import closed_loop, open_loop
from triton_repo.server import free_port

ASKED = {"QUESTION": ("BYTES", [-1, 1]), "CONTEXT": ("BYTES", [-1, 1])}
PAIRS = {"TEXT": ("BYTES", [-1, 1]), "TEXT_PAIR": ("BYTES", [-1, 1])}
IMAGES = {"IMAGE": ("BYTES", [-1, 1])}
both = pytest.mark.parametrize("protocol", ["grpc", "http"])
STALLS, STALLED = 40, 41
"""Number of the request in which the server stands still, after one that warms up, and how many have come when it goes on."""


def ask(fake: Fake, protocol: str, name: str | None) -> Model:
    async def work() -> Model:
        async with Connection(Address(protocol, address(fake, protocol))) as connection:
            return await connection.model(name)

    return asyncio.run(work())


def refusal(fake: Fake, protocol: str, name: str | None) -> str:
    with pytest.raises(InputError) as caught:
        ask(fake, protocol, name)
    (line,) = caught.value.lines
    return line


def send_all(fake: Fake, protocol: str, requests, seconds: float = 20.0):
    """Sends requests one after the other; returns why each has no answer."""

    async def work():
        async with Connection(Address(protocol, address(fake, protocol)), seconds) as connection:
            return [await connection.send(connection.prepare("m", rows)) for rows in requests]

    return asyncio.run(work())


def after_one(fake: Fake, protocol: str, loop):
    """Runs a loop over a connection on which one request was answered."""

    async def work():
        async with Connection(Address(protocol, address(fake, protocol)), 100.0, 1000) as connection:
            request = connection.prepare("m", ["a text"])
            assert await connection.send(request) is None

            async def send(index):
                return await connection.send(request)

            return await loop(send)

    return asyncio.run(work())


@both
def test_each_request_that_was_due_in_a_stall_counts_from_when_it_was_due(protocol):
    """The server stands still until others have come, so a generator that waits for answers never sees the end; no time is asserted.

    The request that ends the stall is not sent before it is due, and only `STALLS - 2` of the schedule were answered before: of the first
    n beyond these, n have waited for the end, whatever else the machine does.
    """
    due = poisson(150.0, 0.8, seed=4)
    last = STALLS + STALLED - 1
    with serving(Fake(stall_at=STALLS, stall_until=last)) as fake:
        samples = after_one(fake, protocol, lambda send: open_loop(send, due.tolist(), 1000))
    assert fake.stalled == STALLED
    assert samples.kinds == ["answered"] * len(due)
    assert sorted(samples.due) == due.tolist()
    assert sum(np.array(samples.ended) < fake.stall_end - samples.start) <= STALLS - 2
    latencies = np.sort(np.array(samples.ended) - np.array(samples.due))[::-1]
    least = due[last - 2] - due[STALLS - 2 : last - 1]
    assert (latencies[:STALLED] >= least - 1e-3).all()
    assert np.percentile(latencies, 99) >= least[2] - 1e-3 > 0.2


@both
def test_what_waits_for_each_answer_meets_a_stall_once(protocol):
    with serving(Fake(stall_at=2, stall_seconds=0.2)) as fake:
        samples = after_one(fake, protocol, lambda send: closed_loop(send, 1, 0.3))
    assert fake.stalled == 1
    assert max(np.array(samples.ended) - np.array(samples.due)) > 0.19, "and counts it"


@both
@pytest.mark.parametrize(
    ("inputs", "rows", "got"),
    [
        (TEXT, ["n\u00e4h", "", "b" * 5000], {"TEXT": ["n\u00e4h".encode(), b"", b"b" * 5000]}),
        (PAIRS, [("a", "b"), ("c", "")], {"TEXT": [b"a", b"c"], "TEXT_PAIR": [b"b", b""]}),
        (ASKED, [Window("a", "b c", 1, 2), Window("d", "e", 0, 0)], {"QUESTION": [b"a", b"d"], "CONTEXT": [b"b c", b"e"]}),
        (IMAGES, [png(1)], {"IMAGE": [png(1)]}),
    ],
    ids=["texts", "pairs", "questions", "images"],
)
def test_rows_arrive_as_they_are_k_in_a_request(protocol, inputs, rows, got):
    with serving(Fake({"m": inputs})) as fake:
        assert ask(fake, protocol, None) == Model("m", tuple(inputs))
        assert send_all(fake, protocol, [rows]) == [None]
    assert fake.requests == [got]


@both
def test_answers_that_differ_from_the_first_one_to_the_same_request_are_counted(protocol):
    with serving(Fake(scores=[0.5, 0.0, 0.5, 0.5000001, 0.5, -0.0, 0.0])) as fake:

        async def work():
            async with Connection(Address(protocol, address(fake, protocol)), 20.0) as connection:
                requests = [connection.prepare("m", [text]) for text in "ab"]
                found = []
                for index in (0, 1, 0, 0, 0, 1, 1):
                    assert await connection.send(requests[index]) is None
                    found.append(connection.changed)
                return found

        assert asyncio.run(work()) == [0, 0, 0, 1, 1, 2, 2]


@both
def test_the_rows_of_each_tier_of_a_cascade_are_counted(protocol):
    with serving(Fake(tiers=(1, 3, 1))) as fake:

        async def work():
            async with Connection(Address(protocol, address(fake, protocol)), 20.0) as connection:
                request = connection.prepare("m", ["a", "b", "c"])
                found = []
                for tiers in ((1, 3, 1), (1, 1, 1)):
                    fake.tiers = tiers  # what a later answer says is a change, and not counted by tier
                    assert await connection.send(request) is None
                    found.append((list(connection.rows_per_tier), connection.changed))
                other = connection.prepare("m", ["d", "e", "f"])
                assert await connection.send(other) is None
                return found, connection.rows_per_tier

        assert asyncio.run(work()) == ([([2, 0, 1], 0), ([4, 0, 2], 1)], [7, 0, 2])
    numbers = re.findall(r"[\d.]+", line_of_tiers([7, 0, 2]))
    assert numbers == ["1", "7", "77.8", "2", "0", "0.0", "3", "2", "22.2"]


@both
def test_errors_by_kind(protocol):
    words = ["unavailable", "exhausted", "deadline", "invalid", "internal", "fine", "Exceeds maximum queue size", "Request timeout expired"]
    with serving(Fake()) as fake:
        found = send_all(fake, protocol, [[word] for word in words])
    kinds = ["refused", "refused", "timed_out", "failed", "failed", None, "refused", "timed_out"]
    assert [failure and failure.kind for failure in found] == kinds
    assert found[0].message == "the word was unavailable"
    assert all("\n" not in failure.message for failure in found if failure)


@both
def test_no_answer_in_time_and_no_server(protocol):
    with serving(Fake()) as fake:
        (late,) = send_all(fake, protocol, [["slow"]], seconds=0.2)
    assert late.kind == "timed_out"
    nobody = Fake(grpc_address=(place := f"127.0.0.1:{free_port()}"), http_address=place)
    (gone,) = send_all(nobody, protocol, [["x"]])
    assert gone.kind == "refused"
    line = refusal(nobody, protocol, None)
    assert line.startswith(f"--server {protocol}://{place}: no answer (")
    assert f"or --protocol {'http' if protocol == 'grpc' else 'grpc'}" in line


@both
def test_a_server_of_the_other_protocol_is_no_answer(protocol):
    with serving(Fake()) as fake:
        fake.grpc_address, fake.http_address = fake.http_address, fake.grpc_address
        assert ": no answer (" in refusal(fake, protocol, "m")


@both
def test_an_earlier_name_that_is_not_listed_is_measured(protocol):
    with serving(Fake({"sentiment": TEXT, "quantize-int8": TEXT}, unlisted=("quantize-int8",))) as fake:
        assert ask(fake, protocol, None).name == "sentiment"
        assert ask(fake, protocol, "quantize-int8").inputs == ("TEXT",)


@both
def test_models_that_do_not_fit_are_refused_in_one_line(protocol):
    language = {"TEXT": ("BYTES", [-1, 1]), "MAX_TOKENS": ("INT32", [-1, 1])}
    models = {"reviews-int8": TEXT, "language": language, "floats": {"TEXT": ("FP32", [-1, 1])}, "flat": {"TEXT": ("BYTES", [1])}}
    with serving(Fake(models)) as fake:
        where = f"{protocol}://{address(fake, protocol)}"
        listed = "ready: flat, floats, language, reviews-int8"
        assert refusal(fake, protocol, None) == f"--server {where}: give --model; {listed}"
        assert refusal(fake, protocol, "reviews-int4") == (
            f"--model reviews-int4: {where} has no such model; {listed}; did you mean 'reviews-int8'?"
        )
        assert refusal(fake, protocol, "loading") == f"--model loading: {where} has no such model; {listed}"
        ending = (
            "; TEXT, TEXT and TEXT_PAIR (with or without ADAPTER), QUESTION and CONTEXT, IMAGE or AUDIO are measured, BYTES [-1, 1] each"
        )
        assert refusal(fake, protocol, "language") == (
            f"--model language: its inputs are TEXT BYTES [-1, 1], MAX_TOKENS INT32 [-1, 1]{ending}"
        )
        assert refusal(fake, protocol, "floats") == f"--model floats: its inputs are TEXT FP32 [-1, 1]{ending}"
        assert refusal(fake, protocol, "flat") == f"--model flat: its inputs are TEXT BYTES [1]{ending}"


@both
def test_a_server_that_keeps_its_list_to_itself(protocol):
    with serving(Fake(lists=False)) as fake:
        assert ask(fake, protocol, "m").name == "m"
        assert refusal(fake, protocol, None).endswith("give --model; the server does not list its models")
        line = refusal(fake, protocol, "other")
        assert line.endswith("does not describe it (unknown model: 'other'); the server does not list its models")


@pytest.mark.parametrize(
    ("url", "protocol", "found"),
    [
        ("127.0.0.1:8001", None, "grpc://127.0.0.1:8001"),
        ("grpc://host:1/", None, "grpc://host:1"),
        ("http://host:8000", None, "http://host:8000"),
        ("http://host:8000/", "http", "http://host:8000"),
        ("host:8000", "http", "http://host:8000"),
        ("[::1]:8001", None, "grpc://[::1]:8001"),
        ("https://host:8000", "http", "https://host:8000"),
        ("grpcs://host:8001/", None, "grpcs://host:8001"),
    ],
)
def test_urls(url, protocol, found):
    assert str(address_of(url, protocol)) == found


@pytest.mark.parametrize(
    ("url", "protocol", "words"),
    [
        ("ftp://host:1", None, "protocol ftp; grpc, grpcs, http and https are allowed"),
        ("https://host:1", "grpc", "given with --protocol grpc"),
        ("host:1", "rest", "protocol rest; grpc, grpcs, http and https"),
        ("http://host:1", "grpc", "given with --protocol grpc"),
        ("host", None, "host:port is allowed"),
        ("host:x", None, "host:port is allowed"),
        ("host:99999", None, "host:port is allowed"),
        ("http://host:1/v2", None, "host:port is allowed"),
        ("me@host:1", None, "host:port is allowed"),
        ("", None, "host:port is allowed"),
    ],
)
def test_urls_that_are_none(url, protocol, words):
    with pytest.raises(InputError, match=words):
        address_of(url, protocol)


def test_rows_that_the_model_does_not_read():
    text, pairs = Model("m", ("TEXT",)), Model("p", ("TEXT", "TEXT_PAIR"))
    check_rows(["a"], text)
    check_rows([("a", "b")], pairs)
    check_rows([b"png"], Model("i", ("IMAGE",)))
    for rows, model, words in (
        ([("a", "b")], text, r"^--model m: reads single texts \(TEXT\), but the rows are pairs of texts$"),
        (["a", b"x"], pairs, r"reads pairs of texts \(TEXT, TEXT_PAIR\), but the rows are encoded images and single texts$"),
        ([np.int32([1])], text, "but the rows are tokens"),
        ([], text, "^rows: none given; give at least one$"),
    ):
        with pytest.raises(InputError, match=words):
            check_rows(rows, model)
