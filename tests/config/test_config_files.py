"""What is no configuration at all, and what tries to be too much of one."""

import random

import pytest

from router.config.load import load
from router.config.problems import ConfigErrors
from router.config.reading import FILE_BYTES_MAX


def _fatal(folder, content):
    folder.file.write_bytes(content)
    problems = folder.problems()
    assert problems[-1].where == "(file)", [str(problem) for problem in problems]
    return problems[-1]


def _outcome(folder):
    try:
        return load(folder.file, environ={}), ()
    except ConfigErrors as errors:
        return None, errors.problems


def test_a_missing_file_is_one_problem(folder):
    assert folder.problems()[0].message == "there is no such file"


def test_a_folder_in_place_of_a_file_is_one_problem(folder):
    folder.file.mkdir()

    assert folder.problems()[0].message == "cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        (b"", 1, "holds no settings"),
        (b"# only a comment\n", 1, "holds no settings"),
        (b"- a\n", 1, "is not a mapping"),
        (b"text\n", 1, "is not a mapping"),
        (b"*x\n", 1, "is not a mapping"),
        (b"a: 1\n---\nb: 2\n", 2, "a second YAML document"),
        (b"a: 1\nb: [1, 2\nc: 3\n", 3, "not valid YAML at column"),
        (b"a: 1\n  b: 2\n", 2, "not valid YAML at column 4"),
        (b"a: 1\nb: \xff\n", 2, "not UTF-8 at byte 4"),
        (b"a: 1\nb: '\x00'\n", 2, "the character U+0000 is not allowed in YAML"),
        (b"? [a]\n: 1\n", 1, "a key is not a plain text"),
        (b"a: " + b"[" * 40, 1, "nested deeper than 16 levels"),
        (b"a: [" + b"1," * 30_000 + b"]", 1, "more than 20000 values"),
        (b"#" * (FILE_BYTES_MAX + 1), 1, "larger than 1048576 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(folder, content, line, said):
    problem = _fatal(folder, content)

    assert problem.line == line
    assert said in problem.message


def test_anchors_aliases_and_tags_are_refused_where_they_stand_and_never_expanded(folder, valid):
    bomb = "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9))

    problems = folder.problems(valid + "x0: &x0 [1]\n" + bomb + "x9: !!python/name:os.system ''\n")

    assert {"anchor", "alias", "tag"} <= {word for problem in problems for word in problem.message.split()}
    assert not any("python" in str(problem) for problem in problems)


def test_mistakes_before_the_one_that_ends_the_reading_are_told_too(folder):
    problems = folder.problems("a: 1\na: 2\nb: '\n")

    assert [problem.line for problem in problems] == [2, 4]


def test_an_unquoted_variable_between_braces_is_told_to_be_quoted(folder, valid):
    problem = _fatal(folder, valid.replace("8080", "${PORT}").encode())

    assert problem.fix == 'Write "${NAME}" in quotes: unquoted it cannot stand between { and }.'


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder, valid):
    folder.file.write_bytes(b"\xef\xbb\xbf" + valid.replace("\n", "\r\n").encode())

    assert load(folder.file, environ={}).server.port == 8080


def test_a_problem_is_one_printable_line(folder, valid):
    problems = folder.problems(valid + '"a\\nb\\x1b[2J": 1\n')

    assert [str(problem).isprintable() for problem in problems] == [True]


def test_no_damaged_file_gets_past_or_out_other_than_as_problems(folder, valid):
    dice = random.Random(7)
    pieces = [
        "\n",
        " ",
        ":",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "&a",
        "*a",
        "!t",
        "${X}",
        "~",
        "8k",
        "\t",
        "\x00",
        "é",
    ]

    for _ in range(300):
        text = valid
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(text))
            text = text[:at] + dice.choice(pieces) + text[at + dice.randint(0, 6) :]
        folder.file.write_text(text)
        config, problems = _outcome(folder)
        assert (config is None) == bool(problems)
        assert all(problem.fix and problem.message and problem.line >= 1 for problem in problems)
        assert "${" not in repr(config)


def test_no_part_of_the_tree_can_be_of_the_wrong_kind_without_a_problem(folder, valid):
    import yaml

    wrong = [None, 7, "text", [], {}, [None], [7], {"a": 1}, True, 1e300]
    tree = yaml.safe_load(
        valid + "relays: [{name: r, url: 'http://r', models: {llama: x}}]\nkeys: [{name: k, key: x}]\n"
    )
    places = []

    def walk(node, path):
        places.append(path)
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            walk(value, (*path, key))

    walk(tree, ())
    for path in places[1:]:
        for value in wrong:
            damaged = yaml.safe_load(yaml.safe_dump(tree))
            holder = damaged
            for part in path[:-1]:
                holder = holder[part]
            holder[path[-1]] = value
            folder.file.write_text(yaml.safe_dump(damaged))
            config, problems = _outcome(folder)
            assert (config is None) == bool(problems)
