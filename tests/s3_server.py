"""The server of moto as S3, for tests of stores; needs `pip install s3fs 'moto[server]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "a-bucket"
SECRET = "hunter2"


@contextmanager
def s3_server() -> Iterator[str]:
    """Starts a server with an empty bucket, and sets the environment variables that clients of S3 read; yields the URL of a store in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "ACCESS_KEY_ID": "an-id",
        "SECRET_ACCESS_KEY": SECRET,
        "ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"AWS_{name}", value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        try:
            yield f"s3://{BUCKET}/team"
        finally:
            boto3.resource("s3").Bucket(BUCKET).objects.all().delete()  # servers of one process share what they hold
            boto3.client("s3").delete_bucket(Bucket=BUCKET)
            server.stop()
