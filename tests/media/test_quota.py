"""Grants: whatever members do, together they keep the capacity."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.tiers.media.quota import Member, Quota

CAPACITY = 1000


def test_nothing_is_granted_before_the_first_count() -> None:
    quota = Quota(CAPACITY)
    members = {"a": Member(0, 500)}
    quota.welcome(members)
    assert not quota.grant(members, CAPACITY)
    quota.begin_count(members)
    quota.end_count(300)
    assert quota.room_bytes == 700
    assert quota.grant(members, CAPACITY)
    assert quota.granted == {"a": 500}
    assert quota.used_bytes == 800
    assert not quota.grant(members, CAPACITY)


def test_what_room_there_is_is_shared_and_who_wants_least_has_it_first() -> None:
    quota = Quota(CAPACITY, 400)
    members = {"a": Member(0, 100), "b": Member(0, 900), "c": Member(0, 900)}
    quota.welcome(members)
    assert quota.wanted_bytes(members) == 1900
    quota.grant(members, CAPACITY)
    assert quota.granted == {"a": 100, "b": 250, "c": 250}
    assert quota.room_bytes == 0


def test_the_file_system_may_have_less_room() -> None:
    quota = Quota(CAPACITY, 0)
    members = {"a": Member(0, 900)}
    quota.welcome(members)
    assert not quota.grant(members, -5)
    quota.grant(members, 30)
    assert quota.granted == {"a": 30}


def test_who_wrote_before_it_was_known_is_not_charged_again() -> None:
    quota = Quota(CAPACITY, 400)
    members = {"late": Member(5000, 5100)}
    quota.welcome(members)
    assert quota.used_bytes == 400
    quota.grant(members, CAPACITY)
    assert quota.granted == {"late": 5100}
    assert quota.used_bytes == 500


def test_a_count_gives_back_what_was_granted_and_not_written() -> None:
    quota = Quota(CAPACITY, 0)
    members = {"a": Member(0, 600), "gone": Member(0, 300)}
    quota.welcome(members)
    quota.grant(members, CAPACITY)
    quota.evicted_bytes = 50
    quota.leave("gone")
    assert quota.used_bytes == 850, "it may have written all of it"
    members = {"a": Member(200, 600)}
    quota.begin_count(members)
    assert quota.used_bytes == 850
    quota.end_count(320)
    assert quota.used_bytes == 320 + 400
    assert quota.granted == {"a": 600}


def test_who_leaves_while_it_is_counted_is_charged_until_the_next_count() -> None:
    quota = Quota(CAPACITY, 0)
    quota.welcome({"a": Member(0, 300)})
    quota.grant({"a": Member(0, 300)}, CAPACITY)
    quota.begin_count({"a": Member(0, 300)})
    quota.leave("a")
    quota.end_count(0)
    assert quota.used_bytes == 300
    quota.begin_count({})
    quota.end_count(120)
    assert quota.used_bytes == 120


def test_another_member_of_the_same_name() -> None:
    """It counts from zero, and what the first was granted is not its own."""
    quota = Quota(CAPACITY, 0)
    first = {"a": Member(500, 900)}
    quota.welcome(first)
    quota.grant(first, CAPACITY)
    assert quota.granted == {"a": 900}
    second = {"a": Member(0, 100)}
    quota.welcome(second)
    assert quota.granted == {"a": 0}
    assert quota.used_bytes == 400
    quota.grant(second, CAPACITY)
    assert quota.granted == {"a": 100}
    assert quota.used_bytes == 500


def test_who_wrote_more_than_it_was_granted_is_charged_for_it() -> None:
    """The books were lost, and older ones are all that there is."""
    quota = Quota(CAPACITY, 0, granted={"a": 100}, base={"a": 50})
    quota.welcome({"a": Member(300, 300)})
    assert quota.used_bytes == 250


def test_who_leaves_is_charged_for_what_it_wrote_and_that_until_it_is_counted() -> None:
    quota = Quota(CAPACITY, 0)
    members = {"a": Member(0, 600)}
    quota.welcome(members)
    quota.grant(members, CAPACITY)
    members = {"a": Member(200, 600, has_left=True)}
    quota.welcome(members)
    assert quota.used_bytes == 200
    quota.begin_count(members)
    quota.end_count(200)
    assert quota.used_bytes == 200
    assert quota.granted == quota.base == {"a": 200}


def test_what_is_charged_and_probably_not_there() -> None:
    quota = Quota(CAPACITY, 0, departed_bytes=7)
    members = {"killed": Member(0, 100), "well": Member(0, 100), "lost": Member(0, 100)}
    quota.welcome(members)
    quota.grant(members, CAPACITY)
    members = {"killed": Member(40, 100), "well": Member(40, 100)}
    assert quota.unused_bytes(members, {"killed"}) == 7 + 60 + 100
    assert quota.unused_bytes(members, set()) == 7 + 100


class Pool(RuleBasedStateMachine):
    """Members that write as they were granted, a sweeper that counts, evicts and is replaced.

    The model is the bytes that lie in the pool.
    """

    def __init__(self) -> None:
        super().__init__()
        self.quota = Quota(CAPACITY)
        self.pool = 0
        self.written: dict[str, int] = {}
        self.published: dict[str, Member] = {}
        self.may: dict[str, int] = {}
        self.count: int | None = None
        self.num_members = 0
        self.silent: set[str] = set()

    @rule()
    def come(self) -> None:
        name = f"m{self.num_members}"
        self.num_members += 1
        self.written[name] = 0
        self.may[name] = 0

    @precondition(lambda self: self.written)
    @rule(data=st.data(), size=st.integers(1, 120))
    def write(self, data: st.DataObject, size: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.written)))
        if name not in self.silent and self.written[name] + size <= self.may[name]:
            self.written[name] += size
            self.pool += size
            if self.count is not None and data.draw(st.booleans()):
                self.count += size  # it came to be counted

    @precondition(lambda self: self.written)
    @rule(data=st.data(), more=st.integers(0, 400))
    def publish(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.written)))
        if name in self.silent:
            return
        self.published[name] = Member(self.written[name], self.written[name] + more)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def fall_silent(self, data: st.DataObject) -> None:
        """It stops writing, being dead or long without an answer; it may come back later."""
        name = data.draw(st.sampled_from(sorted(self.written)))
        self.may[name] = 0
        self.silent.add(name)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """It says what it wrote, to the last byte, and that this is all."""
        name = data.draw(st.sampled_from(sorted(self.written)))
        if name not in self.silent:
            self.may[name] = 0
            self.silent.add(name)
            self.published[name] = Member(self.written[name], self.written[name], has_left=True)

    @rule()
    def forget_who_left(self) -> None:
        """Once all that it wrote is counted."""
        self.quota.welcome(self.published)
        for name, member in list(self.published.items()):
            if member.has_left and self.quota.granted[name] == self.quota.base[name]:
                self.quota.leave(name)
                del self.published[name]

    @precondition(lambda self: self.silent & self.quota.granted.keys())
    @rule(data=st.data())
    def be_taken_for_gone(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.silent & self.quota.granted.keys())))
        self.quota.leave(name)
        self.published.pop(name, None)

    @precondition(lambda self: self.silent - self.published.keys())
    @rule(data=st.data(), again=st.booleans())
    def come_back(self, data: st.DataObject, again: bool) -> None:
        """As it was, or as another one of the same name."""
        name = data.draw(st.sampled_from(sorted(self.silent - self.published.keys())))
        self.silent.discard(name)
        if again:
            self.written[name] = 0

    @rule()
    def grant(self) -> None:
        self.quota.welcome(self.published)
        self.quota.grant(self.published, CAPACITY)

    @rule()
    def hear(self) -> None:
        """Members read what was granted, some time."""
        for name in self.may.keys() - self.silent:
            self.may[name] = self.quota.granted.get(name, 0) if name in self.published else 0

    @rule()
    def begin_count(self) -> None:
        self.quota.begin_count(self.published)
        self.count = self.pool

    @precondition(lambda self: self.count is not None)
    @rule()
    def end_count(self) -> None:
        assert self.count is not None
        counted, self.count = self.count, None
        self.quota.end_count(counted)

    @precondition(lambda self: self.count is None and self.pool)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, self.pool))
        self.pool -= size
        self.quota.evicted_bytes += size

    @rule()
    def take_over(self) -> None:
        """Another inherits the books, and what was being counted is lost."""
        old = self.quota
        self.count = None
        self.quota = Quota(
            CAPACITY,
            old.counted_bytes,
            old.evicted_bytes,
            old.departed_bytes,
            dict(old.granted),
            dict(old.base),
        )

    @invariant()
    def capacity_is_kept(self) -> None:
        assert self.pool <= CAPACITY
        if self.quota.counted_bytes is not None:
            assert self.pool <= self.quota.used_bytes <= CAPACITY


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=50)
