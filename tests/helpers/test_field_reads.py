"""Reads are recorded by field and reader; the reads of a dataclass itself do not count."""

from dataclasses import asdict, dataclass, replace

from tests.helpers.field_reads import field_reads


@dataclass(frozen=True, slots=True)
class Inner:
    """Its field has the same name as one of Outer."""

    same_name: int = 0


@dataclass(frozen=True, slots=True)
class Outer:
    """The name of each field says how it is read."""

    inner: Inner = Inner()
    same_name: int = 1
    by_property: int = 2
    by_comprehension: int = 3
    by_check: int = 4
    by_describe: int = 5
    by_nothing: int = 6

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        assert self.by_check > 0

    @property
    def double(self) -> int:
        return 2 * self.by_property

    def twice(self) -> list[int]:
        return [self.by_comprehension for _ in range(2)]

    def describe(self) -> str:
        return f"{self.by_describe}"


class Elsewhere:
    """Not a configuration: its methods count as readers."""

    def read(self, outer: Outer) -> int:
        return sum(number.same_name for number in (outer.inner,))


def test_a_read_is_recorded_for_its_field_and_reader() -> None:
    with field_reads(Outer) as reads:
        outer = Outer()
        assert (outer.double, outer.twice(), Elsewhere().read(outer)) == (4, [3, 3], 0)
        assert outer.describe() == "5"
    assert outer.by_nothing == 6  # no longer recorded
    test = f"{__name__}.test_a_read_is_recorded_for_its_field_and_reader"
    assert {path: readers for path, readers in reads.items() if readers} == {
        "inner": {f"{__name__}.Elsewhere.read"},
        "inner.same_name": {f"{__name__}.Elsewhere.read"},
        "by_property": {test},
        "by_comprehension": {test},
    }
    assert "by_nothing" in reads


def test_to_copy_compare_hash_or_print_all_fields_reads_none() -> None:
    with field_reads(Outer) as reads:
        outer = replace(Outer(), same_name=7)
        assert outer != Outer()
        assert asdict(outer)["same_name"] == 7
        assert hash(outer) != hash(Outer())
        assert "same_name=7" in repr(outer)
    readers = {reader.partition(".")[0] for readers in reads.values() for reader in readers}
    assert readers == {"dataclasses"}


def test_leaves_stay_whole() -> None:
    with field_reads(Outer, leaves=(Inner,)) as reads:
        pass
    assert [path for path in reads if "inner" in path] == ["inner"]
