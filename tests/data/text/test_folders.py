import argparse
import inspect

import pytest
import yaml

from polyad.data.errors import DataError
from polyad.data.text import folders
from polyad.data.text.documents import PYTHON_STDLIB, Skipped, open_source
from polyad.data.text.folders import module_files, standard_library


def test_standard_library_is_sorted_and_without_tests():
    root = standard_library()
    names = [path.relative_to(root).parts for path in module_files(root)]
    assert ("argparse.py",) in names
    assert ("json", "decoder.py") in names
    assert names == sorted(names)
    assert not any(set(name) & folders.LEFT_OUT for name in names)


def test_documents_are_the_modules():
    texts = {document.name: document.text for document in open_source(PYTHON_STDLIB).documents()}
    assert texts["argparse.py#0"] == inspect.getsource(argparse)
    assert sum(map(len, texts.values())) > 5_000_000


def test_undecodable_module_is_skipped_and_counted(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "c.py").write_text("c = 1\n")
    monkeypatch.setattr("polyad.data.text.documents.standard_library", lambda: tmp_path)
    skipped = Skipped()
    documents = list(open_source(PYTHON_STDLIB).documents(skipped))
    assert [document.name for document in documents] == ["a.py#0"]
    assert skipped.unreadable == 1


def test_modules_of_a_package_are_read_without_importing_it():
    texts = {document.name: document.text for document in open_source("python:yaml").documents()}
    assert texts["loader.py#0"] == inspect.getsource(yaml.loader)
    assert sorted(texts) == list(texts)


@pytest.mark.parametrize("name", ["no_such_package", "yaml.loader", "argparse", "", "../yaml"])
def test_what_is_no_package_is_refused(name):
    with pytest.raises(DataError, match=f"^python:{name}: '{name}' is no package that this Python"):
        open_source(f"python:{name}")
