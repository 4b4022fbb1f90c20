"""The real server under load, with its environment: python -m pytest -m slow tests/triton_repo/load/test_real_server.py

`test_engines` starts the real server in every test run; there both loops and both protocols meet `fake_server`.
"""

import pytest

from foundation.core.errors import InputError
from tests.triton_repo import tiny_exports as tiny
from triton_repo import environment, layout, service
from triton_repo.load.connection import Address, Model
from triton_repo.load.load import examine, load_test
from triton_repo.load.settings import Load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_both_loops_over_both_protocols(tmp_path):
    for name, prepared, rows in (("text", tiny.text_preprocessor(), tiny.TEXTS), ("image", tiny.image_preprocessor(), tiny.IMAGES)):
        exported = tiny.export(tmp_path / name, prepared, rows, ((name, "fp32"),))
        layout.write_repository(tmp_path / "repository", layout.served_models(exported), pairs=False, batch_sizes=(1, 8))
    with service.Service(tmp_path / "repository", environment.check(), tmp_path / "log") as running:
        cases = (
            ("grpc", running.grpc_address, "text-fp32", "TEXT", tiny.TEXTS),
            ("http", running.http_address, "image-fp32", "IMAGE", tiny.IMAGES),
        )
        for protocol, place, name, tensor, rows in cases:
            server = Address(protocol, place)
            with pytest.raises(InputError, match=r"give --model; ready: image-fp32, text-fp32$"):
                examine(server)
            model = examine(server, name)
            assert model == Model(name, (tensor,))
            found = load_test(server, model, rows, [Load(rate=20.0, seconds=1.0, rows=2), Load(concurrency=2, seconds=0.5)])
            for one in found:
                assert one["answered"] == one["n"] > 0, one["errors"]
                assert 0 < one["latency_ms"]["p50"] <= one["latency_ms"]["max"]
                assert one["rows_per_s"] == pytest.approx(one["rows"] * one["throughput_per_s"], abs=0.01)
            with pytest.raises(InputError, match=r"first request, of 9 rows, .*batch-size must be <= 8"):
                load_test(server, model, rows, [Load(concurrency=1, rows=9)])
