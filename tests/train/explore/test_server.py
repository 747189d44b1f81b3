"""`polyad explore` as a user starts it, asked over HTTP and by a browser."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

import polyad
from polyad.launch.cli import run as command
from tests.helpers.browser import browsing, chromium
from tests.helpers.runs import newest

pytestmark = pytest.mark.distributed
TEXT = "import os\nfor x in os.walk(top):\n"


class Server:
    """A running `polyad explore`."""

    def __init__(self, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyad.launch", "explore", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            pytest.fail(self.process.communicate()[1])
        parts = urlsplit(self.address)
        self.port, self.token = parts.port, parts.path.strip("/")

    def ask(self, path, body=None, *, token=None, **headers):
        """The answer: status, headers, body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        method = "GET" if body is None else "POST"
        where = f"/{self.token if token is None else token}/{path}"
        connection.putrequest(method, where, skip_host="Host" in headers)
        content = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(content)))
        connection.endheaders(content)
        response = connection.getresponse()
        found = response.status, response.headers, response.read()
        connection.close()
        return found

    def view(self, text, *interventions):
        status, _, body = self.ask("view", {"text": text, "interventions": interventions})
        return status, json.loads(body)

    def card(self, **asked):
        asked = "&".join(f"{name}={value}" for name, value in asked.items())
        status, _, body = self.ask(f"card?{asked}")
        return status, json.loads(body)

    def end(self):
        """Ctrl-C; what was written."""
        self.process.send_signal(signal.SIGINT)
        out, error = self.process.communicate(timeout=60)
        return self.process.returncode, out, error


@pytest.fixture(scope="module")
def run(trained):
    return trained("smoe")


@pytest.fixture(scope="module")
def server(run, prepared_path):
    earlier = newest(run).with_name("step-00000003")
    server = Server(run, "--with", earlier, "--data", prepared_path, "--tokens", 2000)
    yield server
    server.process.kill()
    server.process.communicate()


def test_only_who_knows_the_address_is_answered(server):
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", server.address)
    for path in ("", "explore.js", "explore.css", "about"):
        assert server.ask(path)[0] == 200
        for token in ("", "x", server.token[:-1], f"{server.token}x", "é"):
            status, headers, body = server.ask(
                path, token=token.encode().hex() if token == "é" else token
            )
            assert (status, body) == (403, b"403: not allowed\n")
            assert "default-src 'none'" in headers["Content-Security-Policy"]
    body = {"text": "x", "interventions": []}
    assert server.ask("view", body, token="x")[0] == 403
    assert server.ask("view", body)[0] == 200


def test_other_hosts_and_origins_are_refused(server):
    for host in (
        f"127.0.0.1:{server.port}",
        f"localhost:{server.port}",
        f"LOCALHOST:{server.port}",
    ):
        assert server.ask("about", Host=host)[0] == 200
        assert server.ask("about", Host=host, Origin=f"http://{host.lower()}")[0] == 200
    for host in (
        "127.0.0.1",
        "localhost:1",
        f"evil.example:{server.port}",
        f"0.0.0.0:{server.port}",
    ):
        assert server.ask("about", Host=host)[0] == 403
    for origin in (
        "null",
        "http://evil.example",
        f"https://127.0.0.1:{server.port}",
        "http://127.0.0.1",
    ):
        assert server.ask("about", Origin=origin)[0] == 403
        assert server.ask("view", {"text": "x", "interventions": []}, Origin=origin)[0] == 403


def test_the_page_loads_nothing_from_elsewhere_and_is_never_kept(server):
    _, headers, body = server.ask("")
    assert not re.search(rb"(src|href)=\"(?!explore\.(js|css)\")", body)
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers
    policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    script = server.ask("explore.js")[2].decode()
    for writer in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert writer not in script


def check_close(found, expected):
    """Checks JSON values; numbers of two processes differ in their last digits."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        for each, other in zip(found, expected, strict=True):
            check_close(each, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    else:
        assert found == expected


def test_a_view_is_what_python_shows(server, run):
    change = "layer=1,expert=0"  # which tokens use
    status, found = server.view(TEXT, change)
    assert status == 200
    own = polyad.load(run).show(TEXT, interventions=[change])
    other = polyad.load(newest(run).with_name("step-00000003")).show(TEXT, interventions=[change])
    first, second = found["views"]
    check_close(first, json.loads(json.dumps(own.to_json())))
    check_close(second["plain"], json.loads(json.dumps(other.to_json()))["plain"])
    assert first["changed"]["loss"] != pytest.approx(first["plain"]["loss"], abs=1e-4)
    assert second["moved"] == other.moved(own)
    assert second["same_tokens"] is True


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", 'a JSON object {"text": TEXT, "interventions": [...]} is needed'),
        (b"[" * 100_000, 'a JSON object {"text": TEXT, "interventions": [...]} is needed'),
        ({"text": 3, "interventions": []}, "a JSON object"),
        ({"text": "x", "interventions": [["layer=1"]]}, "a JSON object"),
        ({"text": "x " * 99, "interventions": []}, "not allowed; the model reads 1 to 32 tokens "
        "at a time"),
        ({"text": "x", "interventions": ["layer=0,expert=1"]}, "blocks with experts are 1"),
        ({"text": "x", "interventions": ["layer=1,expert=7"]}, "block 1 has experts 0 to 3"),
        ({"text": "x", "interventions": ["layer=1,expert=1,how=no"]}, "how: 'no' is not allowed"),
        ({"text": "x", "interventions": ["layer=1,expert=1"] * 65}, "at most 64 are allowed"),
    ],
)  # fmt: skip
def test_bad_input_is_answered_with_one_line(server, body, error):
    status, _, answer = server.ask("view", body)
    assert status == 400
    assert error in json.loads(answer)["error"]
    assert "\n" not in json.loads(answer)["error"]


def test_a_request_that_is_too_large_is_refused(server):
    assert server.ask("view", b" " * ((1 << 20) + 1))[0] == 413
    assert server.view("x")[0] == 200


def test_cards_and_means_come_from_held_out_text(server):
    asked = {"model": 0, "layer": "blocks.1.feed_forward"}
    for _ in range(300):
        status, found = server.card(**asked, expert=0)
        assert status == 200
        if not found["is_reading"]:
            break
        time.sleep(0.1)
    assert "tokens of held-out text are read" in found["state"]
    cards = [server.card(**asked, expert=expert)[1] for expert in range(4)]
    assert sum(card["load"] for card in cards) == pytest.approx(4)  # times the mean
    for card in cards:
        peaks = [sum(piece["is_peak"] for piece in each["pieces"]) for each in card["words"]]
        assert set(peaks) <= {1}
        highest = [each["coefficient"] for each in card["words"]]
        assert highest == sorted(highest, reverse=True)
    assert any(card["words"] for card in cards)
    _, found = server.view(TEXT, "layer=1,expert=0,how=mean")
    assert found["views"][0]["changed"]["loss"] != found["views"][0]["plain"]["loss"]
    for wrong in ({"expert": 4}, {"expert": -1}, {"expert": "x"}, {}):
        assert server.card(**asked, **wrong)[0] == 400
    assert server.card(model=2, layer="blocks.1.feed_forward", expert=0)[0] == 400


def test_without_data_the_card_says_so_and_ctrl_c_ends_in_order(run):
    server = Server(run)
    status, found = server.card(model=0, layer="blocks.1.feed_forward", expert=0)
    assert status == 200
    assert "--data DATA" in found["state"]
    assert "mean" not in json.loads(server.ask("about")[2])["hows"]
    assert server.end() == (0, "", "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--port", "99999999"], "--port: 99999999 is not allowed"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_words_are_refused_in_a_line(run, words, error, capfd):
    assert command(["explore", str(run), *words]) == 2
    _, said = capfd.readouterr()
    assert said.startswith("polyad: error:")
    assert error in said
    assert said.count("\n") == 1


def test_a_port_that_is_taken_is_refused(run, server, capfd):
    assert command(["explore", str(run), "--port", str(server.port)]) == 2
    assert f"--port: {server.port} is not allowed: Address already in use" in capfd.readouterr().err


def test_a_missing_package_is_said_in_a_line(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "polyad.train.explore.server", raising=False)
    assert command(["explore", "x"]) == 2
    assert capfd.readouterr().err == (
        "polyad: error: explore: uvicorn is not installed: pip install 'polyad[explore]', or in a "
        "clone pip install -c constraints.txt -e '.[explore]'\n"
    )


@pytest.mark.slow
def test_a_browser_shows_experts_and_what_an_intervention_does(server, tmp_path):
    if chromium() is None:
        pytest.skip("no chromium is found: apt-get install chromium")
    with browsing(tmp_path) as browser:
        browser.resize(1400, 900)
        browser.open(server.address)
        browser.wait("byId('models').textContent.includes('step-00000006')")
        browser.type("for x in <b>y</b>:")
        browser.evaluate("byId('text').form.requestSubmit()")
        browser.wait("document.querySelectorAll('.view').length === 2")
        _, found = server.view("for x in <b>y</b>:")
        view = found["views"][0]
        rows = browser.evaluate(
            "[...document.querySelectorAll('.view:first-child tbody tr')].map((row) => "
            "[row.querySelector('th').textContent, row.querySelector('.number').textContent, "
            "[...row.querySelectorAll('.cell i')].map((one) => one.textContent)])"
        )
        assert [row[0] for row in rows] == view["tokens"]
        assert [row[1] for row in rows[1:]] == [
            f"{each:.3f}" for each in view["plain"]["losses"][1:]
        ]
        for row, cell in zip(rows, view["plain"]["cells"][0], strict=True):
            assert row[2] == [str(expert) for expert, weight, _ in cell if weight is not None]
        assert browser.evaluate("document.querySelectorAll('main b b, th b').length") == 0

        # By keys: from the last token, which is chosen, to the one above it.
        browser.evaluate("document.querySelector('.cell[aria-pressed=true]').focus()")
        browser.key("ArrowUp")
        chosen = len(rows) - 2
        browser.wait(f"state.chosen.token === {chosen}")
        assert browser.evaluate("document.activeElement.dataset.token") == str(chosen)
        expert = view["plain"]["cells"][0][chosen][0][0]
        assert browser.evaluate("state.expert") is not None
        browser.evaluate(f"[...document.querySelectorAll('.chip')].find((one) => "
                         f"one.textContent === 'expert {expert}').click()")  # fmt: skip
        browser.evaluate("byId('add').focus()")
        browser.key("Enter")
        browser.wait("document.querySelector('#sum-0 .changed')")
        _, found = server.view("for x in <b>y</b>:", f"layer=1,expert={expert}")
        changed = found["views"][0]["changed"]
        said = browser.evaluate("byId('sum-0').textContent")
        by = changed["loss"] - view["plain"]["loss"]
        assert abs(by) > 5e-4
        assert f"loss {view['plain']['loss']:.4f} → {changed['loss']:.4f} ({by:+.4f} nats" in said
        cells = browser.evaluate(
            "[...document.querySelectorAll('.view:first-child tr td:nth-child(3)')]"
            ".map((one) => one.textContent)"
        )
        for cell, before, after in zip(
            cells[1:], view["plain"]["losses"][1:], changed["losses"][1:], strict=True
        ):
            assert float(cell) == pytest.approx(after - before, abs=6e-4)

        browser.evaluate("document.querySelector('#interventions input').click()")
        browser.wait("!document.querySelector('#sum-0 .changed')")
        assert browser.evaluate("state.interventions.length") == 1
        browser.evaluate("document.querySelector('#interventions button').click()")
        browser.wait("!state.interventions.length")

        browser.evaluate("byId('text').value = 'x '.repeat(99); byId('show').click()")
        browser.wait("byId('status').textContent.includes('the model reads 1 to 32')")
        for width in (400, 800, 1400):
            browser.resize(width, 900)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        own = [each for each in browser.errors if "400 (Bad Request)" not in each]
        assert own == []
