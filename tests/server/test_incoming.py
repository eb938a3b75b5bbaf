"""What comes in: JSON whatever its header says, pages of other sites, bodies that are too long or compressed, paths below a proxy's."""

import gzip
import json
import socket

import pytest

from polydraft.config import ServerConfig
from polydraft.errors import InvalidInputError
from tests.server.conftest import serving, small_engine
from tests.server.test_robust import ASK

CHAT = {
    "model": "small",
    "messages": [{"role": "user", "content": "x"}],
    "options": {"num_predict": 2},
    "stream": False,
}


def posted(served, body=ASK, path="/v1/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return served.http.post(
        path, content=content, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain; charset=utf-8"])
def test_json_is_read_whatever_its_header_says(served, kind):
    headers = {} if kind is None else {"content_type": kind}
    for path, body in (("/api/chat", CHAT), ("/v1/completions", ASK), ("/api/show", {"model": "small"})):
        assert posted(served, body, path, **headers).status_code == 200, path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),  # another server of this machine is another site
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site", "origin": "http://localhost:3000"}, 403),
        (
            {"sec_fetch_site": "same-origin", "origin": "https://llm.example.org"},
            200,
        ),  # behind a proxy that writes its own Host
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "{own}"}, 200),
        ({"sec_fetch_site": "cross-site", "origin": "https://page.example"}, 200),
    ],
)
def test_pages_of_other_sites_are_kept_out(headers, status):
    with serving(small_engine(), cors=("https://page.example",)) as open_to_one:
        given = {name: value.replace("{own}", open_to_one.url) for name, value in headers.items()}
        found = posted(open_to_one, content_type="text/plain", **given)
        assert found.status_code == status and (status == 200 or "--cors" in found.text)
        assert (
            open_to_one.http.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 200
        )  # links lead here


def test_a_page_without_the_key_is_told_so():
    with serving(small_engine(), keys=("sk-one",)) as locked:
        assert posted(locked, origin="https://evil.example").status_code == 401
        assert posted(locked, origin="https://a.example", authorization="Bearer sk-one").status_code == 200


def test_a_body_that_is_announced_as_too_long_is_answered_at_once(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:  # a body would be waited for longer
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        assert b"413" in raw.recv(4096).splitlines()[0]


def test_a_compressed_body_is_named_and_a_byte_order_mark_is_read(served):
    found = posted(served, gzip.compress(json.dumps(ASK).encode()), content_encoding="gzip")
    assert found.status_code == 415 and "'Content-Encoding: gzip'" in found.json()["error"]["message"]
    assert posted(served, content_encoding="identity").status_code == 200
    assert posted(served, b"\xef\xbb\xbf" + json.dumps(ASK).encode()).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/page/page.js", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(served, method, path, allowed):
    found = served.http.request(method, path)
    assert found.status_code == 405 and sorted(found.headers["allow"].split(", ")) == allowed.split(", ")


def test_the_name_of_a_containers_host_is_refused_with_its_option():
    asked = {"Host": "host.docker.internal:8000"}
    with serving(small_engine()) as local:
        found = local.http.get("/v1/models", headers=asked)
        assert (
            found.status_code == 403
            and "--allowed-host host.docker.internal." in found.json()["error"]["message"]
        )
    with serving(small_engine(), allowed_hosts=("host.docker.internal",)) as named:
        assert named.http.get("/v1/models", headers=asked).status_code == 200


@pytest.mark.parametrize("left", ["", "/llm"])
def test_a_server_below_a_path_answers_whether_the_proxy_takes_it_away_or_not(left):
    with serving(small_engine(), root_path="/llm", keys=("sk-one",)) as below:
        for path in ("/health", "/", "/page/page.js"):  # without a key
            assert below.http.get(left + path).status_code == 200, path
        found = posted(below, path=f"{left}/v1/completions", authorization="Bearer sk-one")
        assert found.status_code == 200
        assert below.http.get("/llm").headers["location"] == "/llm/"
        described = below.http.get(f"{left}/openapi.json", headers={"authorization": "Bearer sk-one"}).json()
        assert described["servers"] == [{"url": "/llm"}]
        assert '"/page' not in below.http.get("/").text


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_path_of_another_form_is_refused(path):
    with pytest.raises(InvalidInputError, match="expected a path such as '/llm'"):
        ServerConfig(root_path=path)
