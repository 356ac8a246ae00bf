"""Every mistake in a scenario ends as one sentence with the file, the key path and what to change."""

from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment, sources
from testbed.experiments.sources import _parse, read_toml

Complain = Callable[..., str]

OPTIONS = {
    # what is set: what the sentence says after the file and the option
    "workload.rat=1": 'workload.rat: unknown key (did you mean "rate"?)',
    'workload.file="a\\u0000b"': 'workload.file: has a NUL character ("\\u0000"), which no name and no path can have; remove it',
    "wrkload.rate=1": 'wrkload: unknown key (did you mean "workload"?)',
    "network.pairs.0.rtt=5 msec": 'network.pairs.0.rtt: unknown unit "msec" (did you mean "ms"?)',
    "network.pairs.0.rtt=5": 'network.pairs.0.rtt: must be text with a unit such as "100 ms", not 5',
    "network.pairs.0.rtt=-5 ms": 'network.pairs.0.rtt: must not be negative, but is "-5 ms"',
    "network.pairs.0.rate=0 bit/s": 'network.pairs.0.rate: must be more than 0, not "0 bit/s"',
    "network.kind=cluster": 'network.kind: unknown value "cluster" (did you mean "clusters"?)',
    "network.kind=matrix": (
        'network.kind: is "matrix", but pairs is a key of kind = "clusters": leave out pairs, change kind, or give '
        "the whole table anew, as {kind = ..., ...}"
    ),
    "network={kind='topology',topology='abovenet',detor=2}": 'network.detor: unknown key (did you mean "detour"?)',
    "workload.n_input_tokens={distribution='uniform',mean=4}": (
        'workload.n_input_tokens.distribution: is "uniform", but mean is a key of distribution = "lognormal"'
    ),
    "network.backend=nete": 'network.backend: unknown value "nete" (did you mean "netem"?)',
    "clients.site=C": 'clients.site: unknown site "C"; valid: A, B',
    "clients.count=0": "clients: there are no clients",
    "clients.name=a100-1": 'clients: makes a second node "a100-1" beside servers.0',
    "clients.name=a b": 'clients.name: "a b" must consist of letters (a to z, A to Z), digits',
    "servers.0.count=0": "servers: there are no servers",
    "servers.0.count=-1": "servers.0.count: must be at least 0, not -1",
    "servers.0.count=true": "servers.0.count: must be a whole number, not true",
    "servers=[]": "servers: needs at least 1 entry",
    "name=''": "name: must not be empty",
    "network={kind='topology',topology=''}": "network.topology: must not be empty",
    "servers.0.memory=0 GB": "servers.0.memory: must be more than 0",
    "servers.0.hardware=a10": 'servers.0.hardware: unknown hardware "a10"; valid: a100, ',
    "servers.7.count=1": 'servers: is a list with the entries 0 to 0, and has no entry "7"',
    "workload.rate.x=1": 'workload.rate: is a single value and has no key "x"',
    "model.profile=bloom": 'model.profile: unknown model "bloom" (did you mean "bloom-3b"?)',
    "workload.n_output_tokens=0": "workload.n_output_tokens: must be at least 1, not 0",
    "workload.n_input_tokens={distribution='unifrm'}": (
        'workload.n_input_tokens.distribution: unknown value "unifrm" (did you mean "uniform"?)'
    ),
    "workload.n_input_tokens={distribution='uniform',low=4,high=2}": (
        "workload.n_input_tokens.high: must be at least low (4), not 2"
    ),
    "workload.n_input_tokens={distribution='choice',values=[1,2],weights=[1]}": (
        "workload.n_input_tokens.weights: must have one weight for each of values"
    ),
    "workload.shape=2": 'workload.shape: is only for arrivals = "gamma"; arrivals is "poisson"',
    "workload.rate=0": "workload.rate: must be more than 0, not 0",
    "time_scale=0": "time_scale: must be more than 0, not 0",
    "time_scale=-2": "time_scale: must be more than 0, not -2",
    "time_scale=inf": "time_scale: must be a finite number, not inf",
    "seed=abc": 'seed: must be a whole number, not "abc"',
    "policy.name=propsed": 'policy.name: unknown policy pair "propsed" (did you mean "proposed"?)',
    "policy.design_concurrency=0": 'policy.design_concurrency: must be "auto", "searched" or a whole number',
    "calibration.set=petals": 'calibration.set: unknown calibration set "petals"',
    "backoff.max=0.5 s": "backoff.max: must be at least backoff.first",
    "servers.0.count=100001": "servers.0.count: must be at most 100,000, not 100001",
    "servers.0.count=100000": "servers: 100,000 servers and 1 clients are too many; at most 100,000 nodes",
    "servers.0.count=5000": "servers: 5,000 servers and 1 clients have 25,005,000 links between them",
    "clients.count=100000": "clients: 2 servers and 100,000 clients are too many",
    "model.n_blocks=1000000000": "model.n_blocks: must be at most 10,000, not 1000000000",
    "workload.n_requests=99999999999999": (
        "workload.n_requests: must be at most 10,000,000, not 99999999999999"
    ),
    "workload.n_input_tokens=10000001": "workload.n_input_tokens: must be at most 10,000,000, not 10000001",
    "workload.n_output_tokens={distribution='choice',values=[1,2],weights=[1e308,1e308]}": (
        "workload.n_output_tokens.weights.0: must be at most 1e+15, not 1e+308"
    ),
    "workload.n_output_tokens={distribution='lognormal',mean=5,sigma=1e200,max=9}": (
        "workload.n_output_tokens.sigma: must be at most 10, not 1e+200"
    ),
    "workload.rate=1e-300": "workload.rate: must be at least 1e-15, not 1e-300",
    "workload.rate=1e-14": "workload.rate: puts the last request at ",
    "hardware.a100.decode=1e308 s": (
        'hardware.a100.decode: "1e308 s" is too large; the most is 1000000000 s'
    ),
    "hardware.a100.memory=1e299 GB": (
        'hardware.a100.memory: "1e299 GB" is too large; the most is 1000000000 GB'
    ),
    "hardware.a100.petals_forward_rps=1e308": (
        "hardware.a100.petals_forward_rps: must be at most 1e+15, not 1e+308"
    ),
    "calibration.session_setup_petals=1e308 s": (
        'calibration.session_setup_petals: "1e308 s" is too large; the most is 1000000000 s'
    ),
    "network.pairs.0.rate=1e-300 bit/s": (
        'network.pairs.0.rate: "1e-300 bit/s" is too small; the least is 0.000001 bit/s'
    ),
    "network={kind='topology',topology='abovenet',delays='fibre',detour=1e308}": (
        "network.detour: must be at most 100, not 1e+308"
    ),
    "network={kind='matrix',sites=['A'],rtt=[[1e308]],rtt_unit='h',rate='1 Gbit/s'}": (
        'network.rtt: "1e+308 h" is too large; the most is 1000000000 s'
    ),
    "workload={arrivals='listed',requests=[[2e9,1,1]],rate=1}": (
        "workload.requests.0: must be [arrival in seconds, input tokens, output tokens]"
    ),
    "workload={arrivals='listed',requests=[[0,1,1],[1,1,1]],rate=1e-12}": (
        "workload.rate: puts the last request at 1e+12 s; arrivals must end within 1,000,000,000 s"
    ),
    "workload={arrivals='listed',requests=[[0,1,1],[1e-320,1,1]]}": (
        "workload.rate: is missing; give it, since all requests arrive at the same time"
    ),
    "workload.requests=[[0]]": 'workload.requests: is only for arrivals = "listed"',
    "hardware.a100.base=x100": 'hardware.a100.base: unknown hardware "x100"; valid: a100, ',
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_bad_option_is_refused_with_file_option_key_and_remedy(complaint: Complain, option: str) -> None:
    assert complaint(option).startswith(f"small.toml with --set {option}: {OPTIONS[option]}")


def test_all_options_are_named_of_which_the_last_is_wrong_beside_the_others() -> None:
    options = ["workload.n_requests=1", "servers.0.power_idle=1 kW", "servers.0.cost_per_hour=1"]
    said = "with --set servers.0.power_idle=1 kW --set servers.0.cost_per_hour=1: servers: have cost_per_hour in some"
    with pytest.raises(ScenarioError, match=said):
        load_experiment("clustered", options)


FILES = {
    "an unknown key in a list": (
        ("count = 2", "cuont = 2"),
        'servers.0.cuont: unknown key (did you mean "count"?)',
    ),
    "a missing key": (("rate = 0.5\n", ""), 'workload.rate: is missing; arrivals = "poisson" needs it'),
    "a missing table": (('[model]\nprofile = "bloom-176b"', ""), "model: is missing"),
    "a network without kind": (('kind = "clusters"', ""), "network.kind: is missing"),
    "a site without a row for itself": (
        ('    { sites = ["A", "A"], rtt = "5 ms", rate = "1 Gbit/s" },\n', ""),
        "network.pairs: no row for A to A, but a100-1 and a100-0 need one",
    ),
    "two sites without a row": (
        ('["A", "B"]', '["B", "B"]'),
        "network.pairs: no row for B to A, but client-0 and a100-0 need one",
    ),
    "only one direction": (
        ('sites = ["A", "B"], rtt = "100 ms"', 'from = "A", to = "B", delay = "50 ms"'),
        "network.pairs: no row for B to A, but client-0 and a100-0 need one",
    ),
    "rows that contradict": (
        ("pairs = [", 'pairs = [{ sites = ["B", "A"], rtt = "90 ms", rate = "1 Gbit/s" },'),
        "network.pairs.2: contradicts network.pairs.0 for A to B; keep one of the two rows",
    ),
    "a direction that contradicts": (
        ("pairs = [", 'pairs = [{ from = "B", to = "A", delay = "9 ms", rate = "1 Gbit/s" },'),
        "network.pairs.2: contradicts network.pairs.0 for B to A; keep one of the two rows",
    ),
    "a row given twice": (
        ("pairs = [", 'pairs = [{ sites = ["B", "A"], rtt = "100 ms", rate = "100 Mbit/s" },'),
        "network.pairs.2: repeats network.pairs.0 for A to B; keep one of the two rows",
    ),
    "a row of both forms": (
        ('{ sites = ["A", "A"],', '{ sites = ["A", "A"], from = "A",'),
        "network.pairs.0: must have either sites, rtt and rate, or from, to, delay (one way) and rate",
    ),
    "a name used twice": (
        ("[clients]", '[[servers]]\nhardware = "a100"\nsite = "A"\nname = "a100-1"\n[clients]'),
        'servers.1: makes a second node "a100-1" beside servers.0; change its name',
    ),
    "a pair name and another placement": (
        ("", '[policy]\nname = "proposed"\nplacement = "petals"\n'),
        'policy.placement: "petals" contradicts policy.name = "proposed", which means placement "cg-bp"; '
        "keep one of the two",
    ),
    "half a policy": (
        ("", '[policy]\nplacement = "petals"\n'),
        "policy.routing: is missing; give it, or a pair by name (petals, ",
    ),
    "gamma arrivals without shape": (
        ("[workload]", '[workload]\narrivals = "gamma"'),
        'workload.shape: is missing; arrivals = "gamma" needs it',
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused_with_key_and_remedy(complaint: Complain, case: str) -> None:
    replace, said = FILES[case]
    assert complaint(replace=replace).startswith(f"small.toml: {said}")


def test_new_hardware_needs_all_numbers_or_a_base(complaint: Complain) -> None:
    said = complaint('hardware.x={memory="80 GB"}', "servers.0.hardware=x")
    assert (
        "hardware.x: decode, prefill_base and prefill_per_token are missing; give them, or copy the rest from "
        'another profile with base = "..."' in said
    )


def test_hardware_of_a_gpus_name_is_told_that_it_can_have_the_rest_from_there(complaint: Complain) -> None:
    said = complaint('hardware.h100={memory="80 GB"}', "servers.0.hardware=h100")
    assert said.endswith('or copy the rest from another profile with base = "h100"')


def test_hardware_based_on_itself_is_refused(complaint: Complain) -> None:
    said = complaint('hardware={x={base="y"},y={base="x"}}', "servers.0.hardware=x")
    assert said.endswith('"x" is based on itself (x -> y -> x)')


@pytest.mark.parametrize("option", ["foo", "=3", "a..b=3", ".=1"])
def test_an_option_of_the_wrong_form_is_refused_with_an_example(complaint: Complain, option: str) -> None:
    said = complaint(option)
    assert said == f"--set {option}: must have the form key.path=value, for example workload.rate=0.5"


def test_a_toml_mistake_is_named_by_file_line_and_column(complaint: Complain) -> None:
    said = complaint(replace=('name = "small"', "name ="))
    assert said == "small.toml: not valid TOML: Invalid value (at line 2, column 7)"
    said = complaint(replace=("", '[clients]\nsite = "A"\n'))
    assert said.startswith("small.toml: not valid TOML: Cannot declare ('clients',) twice (at line ")


def test_toml_nested_too_deeply_is_refused(complaint: Complain) -> None:
    deep = f"x = {'[' * 100_000}"
    assert complaint(replace=("", deep)) == "small.toml: is nested too deeply for a scenario"
    assert "seed: must be a whole number" in complaint(f"seed={'[' * 100_000}")


@pytest.mark.parametrize(
    ("before", "part", "after"),
    [
        ("", "a", " = 1"),
        ("[", "a", "]"),
        ("[[", '"a.b"', "]]"),
        ("x = { ", "'a'", " = 1 }"),
        ('x = """\n"""\n', "a-1", " = 1"),
        ("# don't\n", "a", ""),
        ("x = 'it\\'\n", '"\\""', " = 1"),
    ],
    ids=["key", "table", "array of tables", "inline", "after a text", "after a comment", "after a literal"],
)
@pytest.mark.parametrize("dot", [".", " . "])
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(
    complaint: Complain, before: str, part: str, after: str, dot: str
) -> None:
    said = complaint(replace=("", f"{before}{dot.join([part] * 30_000)}{after}\n"))
    line = before.count("\n") + 22  # of them 21 are the rest of the file
    assert (
        said == f"small.toml:{line}: a key has more than 32 parts; no key of a scenario is nested so deeply"
    )


def test_dots_in_texts_and_comments_are_no_parts_of_keys() -> None:
    dots = ".".join("a" * 100)
    values = (
        f"x = \"{dots}\"\ny = '{dots}'\nz = \"\"\"\n{dots} \"\" {dots}\"\"\"\nq = '''{dots} '' {dots}'''\n"
    )
    text = f"# {dots}\n{values}'{dots}'.b = {[0.5] * 100} # {dots}\n[{'.'.join('a' * 32)}]\n"
    assert list(_parse(text, "file")) == ["x", "y", "z", "q", dots, "a"]


def test_a_file_too_large_to_be_a_scenario_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_TOML_BYTES", 2 * 1024**2)
    path = tmp_path / "large.toml"
    path.write_bytes(b"#" * (2 * 1024**2 + 1))
    with pytest.raises(ScenarioError) as caught:
        read_toml(path)
    assert str(caught.value) == f"{path}: is larger than 2 MiB, the largest file that is read"


def test_a_long_value_is_shown_by_its_beginning(complaint: Complain) -> None:
    said = complaint(f"seed={[*range(10_000)]}")
    assert said.endswith("seed: must be a whole number, not [0, 1, 2, 3, 4, 5, ...]")
    said = complaint(replace=('site = "B"', f'site = "{"B" * 1000}"'))
    assert said.endswith("characters") and len(said) < 200


def test_an_instance_is_named_as_one_that_is_for_simulate(tmp_path: Path) -> None:
    path = tmp_path / "instance.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        load_experiment(str(path))
    assert str(caught.value).endswith(
        "instance.json: is an instance file, since it ends in .json; use it with `testbed simulate`, or give a "
        "scenario (.toml)"
    )


def test_an_unknown_scenario_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ScenarioError) as caught:
        load_experiment("clusterd")
    assert str(caught.value) == (
        'clusterd: no such file or shipped scenario (did you mean "clustered"?); '
        "shipped: abovenet, bellcanada, bloom-tiny, chain-7b, churn, clustered, clustered-gpu, gts-ce, helix-24, helix-42, helix-regions, load-shift, petals-real, trace-replay, wan"
    )


def test_a_folder_is_not_a_scenario(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="is not a file; give a scenario file, or a shipped scenario"):
        load_experiment(str(tmp_path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(ScenarioError, match=r"binary\.toml: is not UTF-8 text \(byte 8\)"):
        load_experiment(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.toml"
    path.touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ScenarioError, match=r"secret\.toml: cannot be read: Permission denied"):
        load_experiment(str(path))
