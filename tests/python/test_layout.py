"""The ctypes structures against the C header, as the C compiler lays it out."""

import ctypes
import os
import re
import subprocess

import pytest

from scape import _library as lib

STRUCTURES = {"scape_config": lib.Config, "scape_stats": lib.Stats}


@pytest.fixture(scope="module")
def measured(root, tmp_path_factory):
    """{name: value} of every size, offset and enumerator that the compiler sees."""
    lines = []
    for name, mirror in STRUCTURES.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in mirror._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("{name}:{field} %zu\\n", sizeof((({name}*)0)->{field}));')
    for enumerator in enumerators(root):
        lines.append(f'printf("{enumerator} %zu\\n", (size_t){enumerator});')
    folder = tmp_path_factory.mktemp("layout")
    source = folder / "layout.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <stddef.h>\n#include <stdio.h>\n"
        '#include "scape/scape.h"\n'
        "int main(void) {\n"
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    program = str(folder / "layout")
    compiler = os.environ.get("SCAPE_TEST_CC", "cc")
    subprocess.run(
        [compiler, "-std=c11", "-I", f"{root}/include", str(source), "-o", program, "-ldl"],
        check=True,
    )
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


def header(root):
    with open(f"{root}/include/scape/scape.h") as file:
        return file.read()


def enumerators(root):
    return re.findall(r"\b(SCAPE_[A-Z0-9_]+) = \d+", header(root))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_is_laid_out_as_in_c(measured, name):
    mirror = STRUCTURES[name]
    assert ctypes.sizeof(mirror) == measured[name]
    for field, kind in mirror._fields_:
        assert getattr(mirror, field).offset == measured[f"{name}.{field}"], field
        assert ctypes.sizeof(kind) == measured[f"{name}:{field}"], field


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_has_every_field_of_the_header(root, name):
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header(root), re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    fields = [re.split(r"[\s*]+", line.strip())[-1] for line in body.split(";") if line.strip()]
    assert fields == [field for field, _ in STRUCTURES[name]._fields_]


def test_enumerators_have_the_values_of_the_header(measured):
    assert {f"SCAPE_ERR_{status.name}" for status in lib.Status if status} | {"SCAPE_OK"} == {
        name for name in measured if name == "SCAPE_OK" or name.startswith("SCAPE_ERR_")
    }
    for status in lib.Status:
        assert measured["SCAPE_OK" if status == 0 else f"SCAPE_ERR_{status.name}"] == status
    for name, value in lib.DTYPES.items():
        assert measured[f"SCAPE_{name.upper()}"] == value
    roles = {"hooked": "GRADIENT_HOOKED"}
    for name, value in lib.ROLES.items():
        assert measured[f"SCAPE_ROLE_{roles.get(name, name.upper())}"] == value
    for name, value in lib.RESIDUALS.items():
        assert measured[f"SCAPE_RESIDUAL_{name.upper()}"] == value
    for name, value in lib.RULES.items():
        assert measured[f"SCAPE_RULE_{name.upper()}"] == value


def test_functions_have_the_parameters_of_the_header(root):
    """By name, since errors name them."""
    text = re.sub(r"\s+", " ", header(root))
    functions = dict(re.findall(r"SCAPE_FUNCTION\([^,]+, (scape_\w+), .*?, \(([\w, ]*)\)\) ", text))
    declared = {name: ", ".join(parameters) for name, (_, parameters) in lib._SIGNATURES.items()}
    assert declared == functions
