import pickle

import pytest

from askmany.pipeline.retry import Retrier, RetryPolicy, is_transient


class HttpError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


class Flaky:
    """Raises the given errors one after another, then returns 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


def test_what_passes_is_tried_again_and_counted() -> None:
    slept: list[float] = []
    retrier = Retrier(RetryPolicy(attempts=5, first_s=1.0, longest_s=3.0), sleep=slept.append)
    action = Flaky(ConnectionResetError("reset"), TimeoutError("slow"), OSError(16, "SlowDown"))
    assert retrier.call("put", action) == 7
    assert retrier.call("get", Flaky(HttpError(503))) == 7
    assert action.calls == 4
    assert retrier.counts == {"put": 3, "get": 1}
    assert retrier.total == 4
    assert len(slept) == 4
    assert all(0 <= pause <= 3 for pause in slept)


def test_the_pauses_are_drawn_not_fixed() -> None:
    slept: list[float] = []
    for _ in range(20):
        Retrier(RetryPolicy(attempts=3, first_s=1.0), sleep=slept.append).call("put", Flaky(OSError("busy"), OSError("busy")))
    assert len({round(pause, 6) for pause in slept}) > 20


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("x"),
        PermissionError("x"),
        OSError(28, "disk full"),
        OSError(22, "bad"),
        ValueError("x"),
        HttpError(403),
        HttpError(404),
    ],
)
def test_what_stays_is_raised_at_once(error: Exception) -> None:
    retrier = Retrier(sleep=lambda seconds: None)
    action = Flaky(error)
    with pytest.raises(type(error)):
        retrier.call("put", action)
    assert action.calls == 1
    assert retrier.total == 0


def test_it_gives_up_with_the_last_error() -> None:
    retrier = Retrier(RetryPolicy(attempts=3), sleep=lambda seconds: None)
    action = Flaky(*(OSError(16, f"busy {n}") for n in range(9)))
    with pytest.raises(OSError, match="busy 2"):
        retrier.call("put", action)
    assert action.calls == 3
    assert retrier.counts == {"put": 2}


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_busy_services_pass(code: int) -> None:
    assert is_transient(HttpError(code))


def test_a_client_library_that_lost_its_connection_passes() -> None:
    botocore = pytest.importorskip("botocore.exceptions")
    assert is_transient(botocore.EndpointConnectionError(endpoint_url="http://127.0.0.1:1"))
    assert not is_transient(botocore.NoCredentialsError())


def test_a_copy_counts_from_zero() -> None:
    retrier = Retrier(RetryPolicy(attempts=4), sleep=lambda seconds: None)
    retrier.call("put", Flaky(OSError("busy")))
    copy = pickle.loads(pickle.dumps(retrier))
    assert copy.policy == retrier.policy
    assert copy.counts == {}
