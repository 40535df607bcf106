"""The examples for other clients: calls that exist, and the Node client against running services."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import MethodDescriptor

from protos.v1 import cache_pb2, worker_pb2
from tests.architecture.sources import ROOT
from tests.cli.conftest import Service

CALL = re.compile(r"stemcache\.v1\.(\w+)/(\w+)")
# A request that a shell command hands over, with the prompt's variable in it.
REQUEST = re.compile(r"-d '(\{.*\})' \S+ stemcache\.v1\.(\w+)/(\w+)")
NODE = ROOT / "examples/node"


def method(service: str, name: str) -> MethodDescriptor:
    for module in (cache_pb2, worker_pb2):
        if service in module.DESCRIPTOR.services_by_name:
            return module.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    raise KeyError(service)


def test_the_calls_of_the_shell_examples_exist() -> None:
    text = (ROOT / "examples/grpcurl.md").read_text()
    calls = CALL.findall(text)
    assert {"Generate", "Tokenize", "Match", "Stats", "Watch", "Describe", "Pin", "Clear", "Drain"} <= {
        c[1] for c in calls
    }
    for service, name in calls:
        assert method(service, name)
    requests = REQUEST.findall(text)
    assert len(requests) >= 3
    for body, service, name in requests:
        message = message_factory.GetMessageClass(method(service, name).input_type)()
        json_format.Parse(body.replace("'\"$PROMPT\"'", "prompt"), message)


def test_the_answers_of_the_shell_examples_are_messages() -> None:
    text = (ROOT / "examples/grpcurl.md").read_text()
    blocks = re.findall(r"^\{\n(?:.*\n)*?\}$", text, re.MULTILINE)
    answers = [json.loads(block) for block in blocks]
    for answer in answers:
        for message in (worker_pb2.GenerateResponse(), cache_pb2.MatchResponse()):
            if set(answer) <= set(message.DESCRIPTOR.fields_by_name):
                json_format.ParseDict(answer, message)
    assert len(answers) >= 6


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.skipif(not (NODE / "node_modules").exists(), reason="no `npm install` in examples/node")
def test_the_node_client_finds_what_it_has_asked_before(service: Service) -> None:
    environment = {
        **os.environ,
        "STEMCACHE_CACHE": service.cache,
        "STEMCACHE_WORKERS": ",".join(service.report["workers"].values()),
    }

    def node(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["node", str(NODE / "client.js"), *arguments]
        return subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=60)

    prompt = f"{'an example for Node ':.<99.99}"
    first, second = node(prompt, "4"), node(prompt, "4")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    name = first.stdout.splitlines()[-1].partition(":")[0]
    assert f"{name}: 99 prompt tokens: 96 cached, 0 fetched, 3 computed" in second.stdout
    alone = node(prompt, "4", STEMCACHE_CACHE="127.0.0.1:1")
    assert alone.returncode == 0
    assert "no advice from the cache service" in alone.stderr
    refused = node(prompt, STEMCACHE_WORKERS="127.0.0.1:1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("UNAVAILABLE: ")
