"""Recipes: what a rule's conditions hit, and how files that are not understood are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.errors import UsageError
from ingot.recipes.choice import Choice
from ingot.recipes.load import load_recipe, parse_recipe
from ingot.recipes.recipe import Decision, Recipe, Rule, parse_layers, resolve

KEEP = "keep = true"


def recipe(*rules: str) -> Recipe:
    return parse_recipe("".join(f"[[rules]]\n{rule}\n" for rule in rules), location="test")


def hit(rule: str, name: str = "w", shape: tuple[int, ...] = (8, 8), dtype: str = "f32", layers: int = 0) -> bool:
    return resolve(recipe(f"{rule}\n{KEEP}"), name, shape, dtype, layers).rule_index == 0


def refusal(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse_recipe(text, location="my.toml")
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ('match = "*.q_proj.weight"', "model.layers.0.self_attn.q_proj.weight", True),
        ('match = "*.q_proj"', "model.layers.0.self_attn.q_proj.weight", False),
        ('match = "q_proj*"', "self_attn.q_proj.weight", False),
        ('match = ["a", "b?"]', "b1", True),
        ('match = "layers.[0-3].*"', "layers.2.w", True),
        ('match = "*.Q_proj*"', "x.q_proj.w", False),
        ('match = "*q_proj*"', "x.q_proj.w", True),
        ('match = "*q_proj*"', "q_proj", True),
        ('match = "*[qk]_proj*"', "x.k_proj.w", True),
        ('match = "*[qk]_proj*"', "x.v_proj.w", False),
        ('match = "**"', "anything", True),
        ('match = "*"', "", True),
        ("match = 're:.*q_proj'", "model.q_proj.weight", True),
        ("match = 're:q_proj'", "model.q_proj.weight", False),
        ("match = 're:.*q_proj$'", "model.q_proj.weight", False),
        ("match = 're:.*w'", "a\nb.w", True),
        ('match = "*.w"', "a\nb.w", True),
        ('match = "*"\nexclude = "*norm*"', "a.norm.w", False),
        ('match = "*"\nexclude = ["re:.*norm", "b"]', "a.w", True),
        ('roles = "mlp"', "model.layers.0.mlp.up_proj.weight", True),
        ('roles = ["attention", "norm"]', "model.layers.0.mlp.up_proj.weight", False),
    ],
)
def test_names(rule: str, name: str, expected: bool) -> None:
    assert hit(rule, name) is expected


@pytest.mark.parametrize(
    ("layers", "hits"),
    [
        ("0", {0}),
        ("0-3,-1", {0, 1, 2, 3, 9}),
        ("-2--1", {8, 9}),
        ("8--1", {8, 9}),
        ("-1", {9}),
        ("-20", set()),
        ("5-100", {5, 6, 7, 8, 9}),
        ("8-8, 2", {2, 8}),
        ("-3-8", {7, 8}),
    ],
)
def test_layers(layers: str, hits: set[int]) -> None:
    found = {layer for layer in range(10) if hit(f'layers = "{layers}"', f"layers.{layer}.w", layers=10)}
    assert found == hits
    assert not hit(f'layers = "{layers}"', "lm_head.weight", layers=10)


@pytest.mark.parametrize("layers", ["", "a", "1-", "3-1", "-1--3", "1,,2", "1;2", "9999999", "--1"])
def test_layers_that_mean_nothing(layers: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_layers(layers)
    assert caught.value.rule == "recipe.layers"


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        ("min_ndim = 2", (8,), False),
        ("min_ndim = 1", (), False),
        ("max_ndim = 2", (2, 2, 2), False),
        ("max_ndim = 0", (), True),
        ("min_size = 64", (8, 8), True),
        ("min_size = 65", (8, 8), False),
        ("max_size = 64", (8, 8), True),
        ("max_size = 63", (8, 8), False),
        ("min_cols = 8", (2, 8), True),
        ("min_cols = 9", (64, 8), False),
        ("cols_multiple_of = 4", (3, 8), True),
        ("cols_multiple_of = 4", (4, 6), False),
        ("min_size = 1", (0, 4), False),
        ("min_size = 1", (2**40, 2**40), True),
    ],
)
def test_shapes(rule: str, shape: tuple[int, ...], expected: bool) -> None:
    assert hit(rule, shape=shape) is expected


def test_dtypes() -> None:
    assert hit('dtypes = ["i8", "f32"]', dtype="f32")
    assert not hit('dtypes = "i8"', dtype="f32")
    assert hit("", dtype="posit16")


def test_a_choice_that_changes_values_takes_weights_only() -> None:
    cast = recipe('codec = "dense"\noptions = { dtype = "bf16" }')
    plain = recipe('codec = "dense"')
    for dtype in ("i32", "bool", "f8_e4m3fn", "complex64", "posit16"):
        assert resolve(cast, "w", (8, 8), dtype, 0).choice is None
        assert resolve(plain, "w", (8, 8), dtype, 0).choice is not None
    error = refusal('[[rules]]\ndtypes = "i32"\ncodec = "dense"\noptions = { dtype = "bf16" }')
    assert error.rule == "recipe.dtype"


def test_first_rule_wins_and_none_keeps() -> None:
    rules = recipe(
        'label = "one"\nmatch = "a*"\ncodec = "dense"\nencoding = "zstd"',
        f'match = "ab"\n{KEEP}',
        'match = "b"\ncodec = "sparse_csr"',
    )
    assert resolve(rules, "ab", (1,), "f32", 0) == Decision(0, "one", Choice("dense", {}, "zstd"))
    assert resolve(rules, "b", (1,), "f32", 0) == Decision(2, "rule 2", Choice("sparse_csr"))
    assert resolve(rules, "c", (1,), "f32", 0) == Decision(None, "no rule", None)


@pytest.mark.parametrize(
    ("text", "rule", "where"),
    [
        ("rules = 3", "recipe.type", "my.toml: rules"),
        ("rules = [1]", "recipe.type", "my.toml: rules"),
        ("nam = 'x'", "recipe.unknown-key", "my.toml"),
        ("name = 3", "recipe.type", "my.toml: name"),
        ("[[rules]]\nkeep = true\n[[rules]]\nbits = 4\nkeep = true", "recipe.unknown-key", "my.toml: rules[1]"),
        ("[[rules]]\nmatch = 4\nkeep = true", "recipe.type", "my.toml: rules[0].match"),
        ("[[rules]]\nmatch = []\nkeep = true", "recipe.type", "my.toml: rules[0].match"),
        ("[[rules]]\nmatch = ['a', 1]\nkeep = true", "recipe.type", "my.toml: rules[0].match"),
        ("[[rules]]\nmatch = 're:('\nkeep = true", "recipe.pattern", "my.toml: rules[0]"),
        ("[[rules]]\nroles = 'atention'\nkeep = true", "recipe.role", "my.toml: rules[0]"),
        ("[[rules]]\nlayers = 3\nkeep = true", "recipe.type", "my.toml: rules[0].layers"),
        ("[[rules]]\nlayers = '3-1'\nkeep = true", "recipe.layers", "my.toml: rules[0]"),
        ("[[rules]]\ndtypes = 'float33'\nkeep = true", "recipe.dtype", "my.toml: rules[0]"),
        ("[[rules]]\nmin_ndim = -1\nkeep = true", "recipe.type", "my.toml: rules[0].min_ndim"),
        ("[[rules]]\nmin_size = true\nkeep = true", "recipe.type", "my.toml: rules[0].min_size"),
        ("[[rules]]\nmin_size = 1.5\nkeep = true", "recipe.type", "my.toml: rules[0].min_size"),
        ("[[rules]]\ncols_multiple_of = 0\nkeep = true", "recipe.shape", "my.toml: rules[0]"),
        ("[[rules]]\nmatch = 'a'", "recipe.choice", "my.toml: rules[0]"),
        ("[[rules]]\nkeep = false", "recipe.choice", "my.toml: rules[0].keep"),
        ("[[rules]]\nkeep = true\ncodec = 'dense'", "recipe.choice", "my.toml: rules[0].keep"),
        ("[[rules]]\ncodec = 'gzip'", "codec.unknown", "my.toml: rules[0]"),
        ("[[rules]]\ncodec = 3", "recipe.type", "my.toml: rules[0].codec"),
        ("[[rules]]\ncodec = 'dense'\nencoding = 'brotli'", "recipe.encoding", "my.toml: rules[0]"),
        ("[[rules]]\ncodec = 'sparse_coo'\nencoding = 'zstd'", "recipe.encoding", "my.toml: rules[0]"),
        ("[[rules]]\ncodec = 'dense'\noptions = 'bf16'", "recipe.type", "my.toml: rules[0].options"),
        (
            "[[rules]]\ncodec = 'dense'\noptions = { dtype = 1979-05-27 }",
            "recipe.type",
            "my.toml: rules[0].options.dtype",
        ),
        ("[[rules]]\ncodec = 'dense'\noptions = { dtype = ['bf16'] }", "dense.option", "my.toml: rules[0]"),
        ("[[rules]]\ncodec = 'sparse_mask'\noptions = { sparsity = [0.5] }", "sparse_mask.option", "my.toml: rules[0]"),
        (
            "[[rules]]\ncodec = 'sparse_mask'\noptions = { n_m = [[[[[2, 4]]]]] }",
            "recipe.type",
            "my.toml: rules[0].options.n_m[0][0][0][0]",
        ),
        ("[[rules]]\ncodec = 'dense'\noptions = { bits = 4 }", "dense.option", "my.toml: rules[0]"),
        ("[[rules]]\ncodec = 'dense'\noptions = { dtype = 'i32' }", "recipe.options", "my.toml: rules[0]"),
        ("[[rules]]\npick = 'smallest'", "recipe.pick", "my.toml: rules[0]"),
        ("[[rules]]\npick = 'best'\ncandidates = [{ codec = 'dense' }]", "recipe.pick", "my.toml: rules[0]"),
        ("[[rules]]\ncandidates = [{ codec = 'dense' }]", "recipe.pick", "my.toml: rules[0]"),
        ("[[rules]]\npick = 'accurate'\ncandidates = [{ codec = 'dense' }]", "recipe.pick", "my.toml: rules[0]"),
        (
            "[[rules]]\npick = 'accurate'\nmin_snr_db = inf\ncandidates = [{ codec = 'dense' }]",
            "recipe.pick",
            "my.toml: rules[0]",
        ),
        (
            "[[rules]]\npick = 'smallest'\nmin_snr_db = 9\ncandidates = [{ codec = 'dense' }]",
            "recipe.pick",
            "my.toml: rules[0]",
        ),
        (
            "[[rules]]\npick = 'accurate'\nmin_snr_db = true\ncandidates = [{ codec = 'dense' }]",
            "recipe.type",
            "my.toml: rules[0].min_snr_db",
        ),
        ("[[rules]]\npick = 1\ncandidates = [{ codec = 'dense' }]", "recipe.type", "my.toml: rules[0].pick"),
        ("[[rules]]\npick = 'smallest'\ncandidates = ['dense']", "recipe.type", "my.toml: rules[0].candidates"),
        ("[[rules]]\npick = 'smallest'\ncandidates = [{}]", "recipe.choice", "my.toml: rules[0].candidates[0]"),
        (
            "[[rules]]\npick = 'smallest'\ncandidates = [{ codec = 'gzip' }]",
            "codec.unknown",
            "my.toml: rules[0].candidates[0]",
        ),
        (
            "[[rules]]\npick = 'smallest'\ncandidates = [{ codec = 'dense', label = 'x' }]",
            "recipe.unknown-key",
            "my.toml: rules[0].candidates[0]",
        ),
        (
            "[[rules]]\npick = 'smallest'\ncodec = 'dense'\ncandidates = [{ codec = 'dense' }]",
            "recipe.choice",
            "my.toml: rules[0]",
        ),
        (
            "[[rules]]\nkeep = true\npick = 'smallest'\ncandidates = [{ codec = 'dense' }]",
            "recipe.choice",
            "my.toml: rules[0].keep",
        ),
        (
            "[[rules]]\ndtypes = 'i32'\npick = 'smallest'\ncandidates = [{ codec = 'affine' }]",
            "recipe.dtype",
            "my.toml: rules[0]",
        ),
        ("[[rules]", "recipe.syntax", "my.toml"),
        ("x = " + "[" * 100_000, "recipe.syntax", "my.toml"),
    ],
)
def test_refusals_name_file_rule_and_key(text: str, rule: str, where: str) -> None:
    error = refusal(text)
    assert (error.rule, error.where) == (rule, where)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{ sparsity = 0.5, inner = 'palette', options = { bits = 4 } }",
            {"sparsity": 0.5, "inner": "palette", "options": {"bits": 4}},
        ),
        ("{ n_m = [2, 4] }", {"n_m": [2, 4]}),
        ("{ n_m = [1, 3] }", {"n_m": [1, 3]}),
    ],
)
def test_options_may_hold_lists_and_the_options_of_a_codec_within(text: str, expected: dict[str, object]) -> None:
    (rule,) = recipe(f"codec = 'sparse_mask'\noptions = {text}").rules
    assert isinstance(rule.choice, Choice)
    assert rule.choice.options == expected


def test_wrong_affine_options_are_refused_at_load() -> None:
    error = refusal("[[rules]]\ncodec = 'affine'\noptions = { bits = 99 }")
    assert error.where == "my.toml: rules[0]"


def test_a_misspelt_key_is_told_its_neighbour() -> None:
    assert "'encoding'" in refusal("[[rules]]\ncodec = 'dense'\nencodings = 'zstd'").message


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rules]]\nmatch = "é"\nkeep = true\n', encoding="utf-8")
    assert load_recipe(path).name == "mine"
    assert load_recipe(str(path)).rules[0].match == ("é",)
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert caught.value.rule == "recipe.syntax"
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError) as caught:
        load_recipe(path)
    assert caught.value.rule == "recipe.syntax"


@pytest.mark.parametrize("name", ["int5", "missing.toml", "", "."])
def test_unknown_recipes(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(name)
    assert caught.value.rule == "recipe.unknown"


def test_fingerprint_covers_what_decides_and_nothing_else() -> None:
    def print_of(text: str) -> str:
        return parse_recipe(text, location="x").fingerprint()

    base = "[[rules]]\nmatch = 'a'\ncodec = 'dense'\noptions = { dtype = 'bf16' }"
    same = (
        "name = 'n'\ndescription = 'd'\n[[rules]]\nlabel = 'l'\ncodec = 'dense'\noptions.dtype = 'bf16'\nmatch = ['a']"
    )
    assert print_of(base) == print_of(same)
    others = [
        base.replace("'a'", "'b'"),
        base.replace("bf16", "f16"),
        base + "\nencoding = 'zstd'",
        base + "\nmin_ndim = 2",
        base + "\n[[rules]]\nkeep = true",
        "[[rules]]\nmatch = 'a'\nkeep = true",
        "[[rules]]\nmatch = 'a'\npick = 'smallest'\ncandidates = [{ codec = 'dense', options = { dtype = 'bf16' } }]",
        "[[rules]]\nmatch = 'a'\npick = 'smallest'\ncandidates = [{ codec = 'dense' }]",
        "[[rules]]\nmatch = 'a'\npick = 'accurate'\nmin_snr_db = 3\ncandidates = [{ codec = 'dense' }]",
        "[[rules]]\nmatch = 'a'\npick = 'accurate'\nmin_snr_db = 4\ncandidates = [{ codec = 'dense' }]",
    ]
    assert len({print_of(base), *(print_of(text) for text in others)}) == 1 + len(others)


def test_fingerprint_is_stable_across_versions() -> None:
    """A change of this value makes interrupted conversions start again: change it knowingly."""
    rule = Rule(Choice("dense", {"dtype": "bf16"}, "zstd"), match=("*.w",), layers="0,-1", min_ndim=2)
    expected = "10900c05c554c747d37bb73b5be8aa58b0b00ad66a3e8aaa482d2b21b5718435"
    assert Recipe("r", (rule,)).fingerprint() == expected


def test_candidates_that_may_change_values_hit_weights_only() -> None:
    lossy = "[[rules]]\npick = 'smallest'\ncandidates = [{ codec = 'dense' }, { codec = 'affine' }]"
    exact = "[[rules]]\npick = 'smallest'\ncandidates = [{ codec = 'dense' }, { codec = 'dense', encoding = 'zstd' }]"
    for text, expected in ((lossy, None), (exact, 0)):
        rules = parse_recipe(text, location="x")
        assert resolve(rules, "w", (4, 4), "i32", 0).rule_index == expected
        assert resolve(rules, "w", (4, 4), "bf16", 0).rule_index == 0


def test_many_tensors_are_resolved() -> None:
    rules = load_recipe("int2")
    names = [f"model.layers.{layer}.mlp.experts.{expert}.w1.weight" for layer in range(10) for expert in range(100)]
    found = {resolve(rules, name, (512, 512), "bf16", 10).rule_label for name in names}
    assert len(found) == 2  # the first and last layer, and the rest
