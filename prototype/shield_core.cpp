// A PROTOTYPE of a compiled core for PrefixShield's default preset; no part of the product.
//
// What policies/adaptive.py does for a block pool, with the same victims: core/ledger.py,
// debtors.py, queues.py, order.py, ghosts.py, chains.py and trial.py in flat arrays. The names are
// theirs, and so are the explanations; only what differs is explained here. Keys are 64-bit
// fingerprints of (group, hash), makers and terms 32-bit ones.

#include <Python.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

// Memory that tracemalloc sees.
template <class T>
struct Traced {
    using value_type = T;
    Traced() = default;
    template <class U>
    Traced(const Traced<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(PyMem_RawMalloc(n * sizeof(T))); }
    void deallocate(T* p, size_t) { PyMem_RawFree(p); }
    template <class U>
    bool operator==(const Traced<U>&) const { return true; }
    template <class U>
    bool operator!=(const Traced<U>&) const { return false; }
};
template <class T>
using Vec = std::vector<T, Traced<T>>;

// std::priority_queue with access to its entries; the smallest is on top.
template <class T>
struct Heap : Vec<T> {
    void add(const T& entry) {
        this->push_back(entry);
        std::push_heap(this->begin(), this->end(), std::greater<T>());
    }
    T drop() {
        std::pop_heap(this->begin(), this->end(), std::greater<T>());
        T top = this->back();
        this->pop_back();
        return top;
    }
    void heapify() { std::make_heap(this->begin(), this->end(), std::greater<T>()); }
};

using Key = uint64_t;
constexpr int NONE = -1;
constexpr double EPSILON = 1e-6;
constexpr double NEVER = -std::numeric_limits<double>::infinity();
constexpr int64_t LAST = std::numeric_limits<int64_t>::max();
enum Class { PROBATIONARY, NORMAL, REUSE };
constexpr int CLASSES = 3;

uint64_t mixed(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
Key key_of(int group, int64_t hash) { return mixed(hash + 0x9e3779b97f4a7c15ULL * (group + 1)); }

// Key -> place of the entry in `entries`, whose `key` it is: linear probing.
template <class Entry>
class Index {
    Vec<int> slots_ = Vec<int>(16, NONE);
    size_t used_ = 0;

   public:
    int find(const Vec<Entry>& entries, Key key) const {
        for (size_t i = key & mask();; i = (i + 1) & mask())
            if (slots_[i] == NONE || entries[slots_[i]].key == key) return slots_[i];
    }
    void insert(const Vec<Entry>& entries, int place) {
        if (++used_ * 4 > slots_.size() * 3) {
            Vec<int> before(slots_.size() * 2, NONE);
            before.swap(slots_);
            for (int old : before)
                if (old != NONE) put(entries, old);
        }
        put(entries, place);
    }
    void erase(const Vec<Entry>& entries, int place) {
        size_t i = entries[place].key & mask();
        while (slots_[i] != place) i = (i + 1) & mask();
        for (size_t j = (i + 1) & mask(); slots_[j] != NONE; j = (j + 1) & mask())
            if (((j - entries[slots_[j]].key) & mask()) >= ((j - i) & mask())) {
                slots_[i] = slots_[j];
                i = j;
            }
        slots_[i] = NONE;
        --used_;
    }

   private:
    size_t mask() const { return slots_.size() - 1; }
    void put(const Vec<Entry>& entries, int place) {
        size_t i = entries[place].key & mask();
        while (slots_[i] != NONE) i = (i + 1) & mask();
        slots_[i] = place;
    }
};

struct Account {
    int group;
    int next = NONE;  // of the group
    double refill_rate, burst, weight;
    double full_at = NEVER, clears_at = NEVER;
    bool used = false;  // only then is it the ledger's
};

class Ledger {
   public:
    double lowest_rate, time = NEVER;
    Vec<Account> accounts;
    Vec<int> first;  // account of each group

    Ledger(double lowest_rate, size_t groups) : lowest_rate(lowest_rate) {
        accounts.reserve(groups);
        first.reserve(groups);
    }
    int open(int group, double rate, double burst) {
        if (size_t(group) >= first.size()) first.resize(group + 1, NONE);
        accounts.push_back({group, NONE, rate, burst, rate / lowest_rate});
        return accounts.size() - 1;
    }
    Account& account(int number) {
        Account& own = accounts.at(number);
        if (!own.used) {
            own.used = true;
            int* end = &first[own.group];
            groups_ += *end == NONE;
            while (*end != NONE) end = &accounts[*end].next;
            *end = number;
        }
        return own;
    }
    double now(double t) { return time = std::max(time, t); }
    void charge(Account& own, size_t blocks, double t) {
        settle(t);
        bool owed = own.clears_at > t;
        if (owed) clearances_ -= own.clears_at;
        own.full_at = std::max(own.full_at, t) + blocks / own.refill_rate;
        own.clears_at = own.full_at - own.burst / own.refill_rate;
        if (own.clears_at <= t) return;
        clearances_ += own.clears_at;
        if (!owed) owing_.add({own.clears_at, int(&own - accounts.data())});
    }
    double mean_debt(double t) {
        settle(t);
        if (owing_.empty()) return 0.0;
        return lowest_rate * (clearances_ - owing_.size() * t) / groups_;
    }
    double mean_debt_of_others(int group, double t) {
        int others = groups_ - (first[group] != NONE);
        if (!others) return 0.0;
        return std::max(0.0, mean_debt(t) * groups_ - normalised_debt(group, t)) / others;
    }
    double raw_debt(int group, double t) const {
        double debt = 0.0;
        for_each(group, t, [&](const Account& own) { debt += own.refill_rate * (own.clears_at - t); });
        return debt;
    }
    double rank(int group, double t) const {
        double rank = t;
        for_each(group, t, [&](const Account& own) {
            rank = rank == t ? own.clears_at : rank + own.clears_at - t;
        });
        return rank;
    }
    double debt(double rank, double t) const { return lowest_rate * (rank - t); }
    double normalised_debt(int group, double t) const { return debt(rank(group, t), t); }
    double heaviest_weight(int group, double t) const {
        double heaviest = 0.0;
        for_each(group, t, [&](const Account& own) {
            if (own.refill_rate * (own.clears_at - t) > EPSILON)
                heaviest = std::max(heaviest, own.weight);
        });
        return heaviest == 0.0 ? 1.0 : heaviest;
    }

   private:
    Heap<std::pair<double, int>> owing_;
    double clearances_ = 0.0;
    int groups_ = 0;

    template <class Do>
    void for_each(int group, double t, Do visit) const {
        for (int i = first[group]; i != NONE; i = accounts[i].next)
            if (accounts[i].clears_at > t) visit(accounts[i]);
    }
    void settle(double t) {
        while (!owing_.empty() && owing_.front().first <= t) {
            int number = owing_.drop().second;
            double clears = accounts[number].clears_at;
            if (clears > t) owing_.add({clears, number});
            else clearances_ -= clears;
        }
        if (owing_.empty()) clearances_ = 0.0;
    }
};

struct Queue {
    int first = NONE, last = NONE;
    bool listed = false;
};

struct Debtor {
    double debt = 0.0;
    int group = NONE;
};

class Debtors {
    const Ledger& ledger_;
    const Vec<Queue>& queues_;
    Heap<std::pair<double, int>> heap_;  // (-clearance time, group)
    Vec<double> entered_;                // by group: its one valid clearance time in the heap
    size_t count_ = 0;

   public:
    using Entry = std::pair<double, int>;
    Debtors(const Ledger& ledger, const Vec<Queue>& queues) : ledger_(ledger), queues_(queues) {}

    void enter(int group, double t) {
        double rank = ledger_.rank(group, t);
        if (ledger_.debt(rank, t) <= EPSILON) return;
        if (size_t(group) >= entered_.size()) entered_.resize(queues_.size() / CLASSES, NEVER);
        if (entered_[group] == rank) return;
        note(group, rank);
        heap_.add({-rank, group});
        if (heap_.size() > 2 * count_ + 16) {
            heap_.clear();
            for (size_t g = 0; g < entered_.size(); ++g)
                if (entered_[g] != NEVER) heap_.push_back({-entered_[g], int(g)});
            heap_.heapify();
        }
    }
    Debtor largest(double t) {
        while (!heap_.empty()) {
            auto [key, group] = heap_.front();
            if (entered_[group] != -key) {
                heap_.drop();
                continue;
            }
            double rank = ledger_.rank(group, t), debt = ledger_.debt(rank, t);
            if (debt > EPSILON && owns_candidate(group) && rank >= -key) return {debt, group};
            heap_.drop();
            if (debt > EPSILON && owns_candidate(group)) {
                entered_[group] = rank;
                heap_.add({-rank, group});
            } else {
                note(group, NEVER);
            }
        }
        return {};
    }
    Entry remove_largest() {
        Entry entry = heap_.drop();
        note(entry.second, NEVER);
        return entry;
    }
    void restore(const Vec<Entry>& entries) {
        for (const Entry& entry : entries)
            if (entered_[entry.second] == NEVER) {
                note(entry.second, -entry.first);
                heap_.add(entry);
            }
    }

   private:
    bool owns_candidate(int group) const {
        const Queue* own = &queues_[CLASSES * group];
        return own[0].first != NONE || own[1].first != NONE || own[2].first != NONE;
    }
    void note(int group, double rank) {
        count_ += (rank != NEVER) - (entered_[group] != NEVER);
        entered_[group] = rank;
    }
};

struct Rule {
    double proven_share;
    bool calls_in_debts;
};

struct Victim {
    int block, queue;  // the queue is 3 * group + class
    bool unproven() const { return queue % CLASSES == PROBATIONARY; }
};
using Victims = Vec<Victim>;

class Order {
    enum Place : uint8_t { HELD, QUEUED, ORPHANED };
    struct Node {  // a block; queue NONE: it is not cached
        int64_t sequence;
        int next, prev, queue = NONE;
        uint8_t chances = 0;
        Place place = HELD;
    };
    struct Claim {  // an entry of a Collection's heap; the largest debt is the smallest claim
        int64_t units;  // of -epsilon
        int of_class;
        int64_t sequence;
        double p, step;
        int group;
        bool operator>(const Claim& o) const {
            return std::tie(units, of_class, sequence) > std::tie(o.units, o.of_class, o.sequence);
        }
    };
    Ledger& ledger_;
    double per_block_;
    Vec<Node> nodes_;
    Vec<Queue> queues_;
    Queue orphans_;
    Heap<std::pair<int64_t, int>> heads_[CLASSES];
    Debtors debtors_;
    Heap<Claim> claims_;
    Vec<Debtors::Entry> drawn_;
    int64_t next_sequence_ = 0;
    int64_t unproven_until_full_;
    bool was_full_ = false;

   public:
    Rule rule;
    int64_t capacity, proven = 0, queued = 0, orphaned = 0;

    Order(size_t nodes, int64_t capacity, Ledger& ledger, Rule rule, double per_block)
        : ledger_(ledger), per_block_(per_block), nodes_(nodes), debtors_(ledger, queues_),
          unproven_until_full_(capacity - std::nearbyint(0.9 * capacity)), rule(rule),
          capacity(capacity) {}

    void add_groups(size_t groups) { queues_.resize(CLASSES * groups); }
    bool is_cached(int block) const { return nodes_[block].queue != NONE; }
    bool is_orphaned(int block) const { return nodes_[block].place == ORPHANED; }
    bool is_queued(int block) const { return nodes_[block].place == QUEUED; }
    int queue_of(int block) const { return nodes_[block].queue; }
    double proven_part() const { return double(proven) / capacity; }
    double largest_debt(double t) { return debtors_.largest(t).debt; }
    void charged(int group, double t) { debtors_.enter(group, t); }

    void admit(int block, int group, bool is_proven) {
        if (!is_proven && !was_full_) is_proven = --unproven_until_full_ < 0;
        nodes_[block].queue = CLASSES * group + (is_proven ? NORMAL : PROBATIONARY);
        nodes_[block].chances = 0;
        proven += is_proven;
    }
    bool reuse(int block, bool promote) {
        Node& node = nodes_[block];
        if (node.chances < 3) ++node.chances;
        int was = node.queue % CLASSES;
        if (was == REUSE || !(promote || was == PROBATIONARY)) return false;
        proven += was == PROBATIONARY;
        node.queue += (promote ? REUSE : NORMAL) - was;
        return promote;
    }
    template <class Iterator>
    void append(Iterator block, Iterator end) {
        for (int before = NONE; block != end; ++block) {
            int number = nodes_[*block].queue;
            Queue& queue = queues_[number];
            push_back(queue, *block, QUEUED);
            nodes_[*block].sequence = next_sequence_++;
            ++queued;
            if (number == before) continue;
            before = number;
            if (!queue.listed) {
                queue.listed = true;
                heads_[number % CLASSES].add({nodes_[*block].sequence, number});
            }
            debtors_.enter(number / CLASSES, ledger_.time);
        }
    }
    void orphan(int block) {
        push_back(orphans_, block, ORPHANED);
        ++orphaned;
    }
    void remove(int block) {  // a candidate, orphaned or not
        bool orphan = is_orphaned(block);
        --(orphan ? orphaned : queued);
        unlink(orphan ? orphans_ : queues_[nodes_[block].queue], block);
    }
    void drop(int block) {
        Node& node = nodes_[block];
        if (node.queue != NONE) proven -= node.queue % CLASSES != PROBATIONARY;
        node.queue = NONE;
    }
    void take_orphans(size_t count, Victims& victims) {
        for (int block; victims.size() < count && (block = orphans_.first) != NONE;) {
            remove(block);
            victims.push_back({block, nodes_[block].queue});
            drop(block);
        }
    }
    void take(size_t count, double t, Victims& victims) {  // `count` in all
        if (victims.size() == count) return;
        was_full_ = true;
        if (debtors_.largest(t).group != NONE) call_in(count, t, victims);
        lose(NONE, count, victims);
    }

   private:
    int64_t head(int queue) const { return nodes_[queues_[queue].first].sequence; }
    static bool is_proven(int queue) { return queue % CLASSES != PROBATIONARY; }
    void push_back(Queue& queue, int block, Place place) {
        Node& node = nodes_[block];
        node.place = place;
        node.next = NONE;
        node.prev = queue.last;
        (queue.last == NONE ? queue.first : nodes_[queue.last].next) = block;
        queue.last = block;
    }
    void unlink(Queue& queue, int block) {
        Node& node = nodes_[block];
        (node.prev == NONE ? queue.first : nodes_[node.prev].next) = node.next;
        (node.next == NONE ? queue.last : nodes_[node.next].prev) = node.prev;
        node.place = HELD;
    }
    bool spares(int queue) const {
        return is_proven(queue) && rule.proven_share && nodes_[queues_[queue].first].chances;
    }
    void give_chance(int number) {
        Queue& queue = queues_[number];
        int block = queue.first;
        --nodes_[block].chances;
        unlink(queue, block);
        push_back(queue, block, QUEUED);
        nodes_[block].sequence = next_sequence_++;
    }
    int first(int of_class) {
        auto& heap = heads_[of_class];
        while (!heap.empty()) {
            auto [sequence, number] = heap.front();
            Queue& queue = queues_[number];
            if (queue.first != NONE && head(number) == sequence) return number;
            heap.drop();
            if (queue.first == NONE) queue.listed = false;
            else heap.add({head(number), number});
        }
        return NONE;
    }
    std::pair<int, int> heads(int group) {  // the queues of the next unproven and proven victim
        if (group == NONE) {
            int normal = first(NORMAL), reuse = first(REUSE);
            if (normal == NONE || (reuse != NONE && head(reuse) < head(normal))) normal = reuse;
            return {first(PROBATIONARY), normal};
        }
        auto filled = [&](int queue) { return queues_[queue].first == NONE ? NONE : queue; };
        int own = CLASSES * group, normal = filled(own + NORMAL);
        return {filled(own), normal == NONE ? filled(own + REUSE) : normal};
    }
    int64_t rival(int queue) {
        const auto& heap = heads_[queue % CLASSES];
        int64_t rival = next_sequence_;
        for (size_t i = 1; i < std::min<size_t>(3, heap.size()); ++i)
            rival = std::min(rival, heap[i].first);
        if (is_proven(queue)) {
            int other = first(queue % CLASSES == NORMAL ? REUSE : NORMAL);
            if (other != NONE) rival = std::min(rival, head(other));
        }
        return rival;
    }
    struct Turn {
        int queue;
        size_t most;
        int64_t before;
    };
    Turn turn(int group, size_t most) {
        double share = rule.proven_share;
        int64_t before = LAST;
        auto [queue, other] = heads(group);
        if (queue == NONE || other == NONE) {
            queue = std::max(queue, other);
        } else if (share == 0) {
            if (head(other) < head(queue)) std::swap(queue, other);
            before = head(other);
        } else if (proven > share * capacity) {
            queue = other;
            most = std::min<size_t>(most, proven - int64_t(share * capacity));
        }
        if (group == NONE && queue != NONE) before = std::min(before, rival(queue));
        return {queue, most, before};
    }
    void lose(int group, size_t count, Victims& victims) {
        while (victims.size() < count) {
            auto [queue, most, before] = turn(group, count - victims.size());
            if (queue == NONE) return;
            take_from(queue, most, before, victims);
        }
    }
    void take_from(int number, size_t count, int64_t before, Victims& victims) {
        Queue& queue = queues_[number];
        count += victims.size();
        while (queue.first != NONE && victims.size() < count && head(number) < before) {
            if (spares(number)) {
                give_chance(number);
                continue;
            }
            int block = queue.first;
            unlink(queue, block);
            --queued;
            drop(block);
            victims.push_back({block, number});
        }
    }
    void claim(int group, double p, double step, double floor) {
        for (int queue = CLASSES * group; p > floor && queue < CLASSES * (group + 1); ++queue)
            if (queues_[queue].first != NONE) {
                int64_t units = -int64_t(std::nearbyint(p / EPSILON));
                claims_.add({units, queue % CLASSES, head(queue), p, step, group});
                return;
            }
    }
    void call_in(size_t count, double t, Victims& victims) {
        double floor = ledger_.mean_debt(t) + EPSILON;
        claims_.clear();
        drawn_.clear();
        Debtor rival = debtors_.largest(t);
        while (victims.size() < count) {
            while (rival.group != NONE &&
                   !(!claims_.empty() &&
                     int64_t(std::nearbyint(rival.debt / EPSILON)) < -claims_.front().units)) {
                if (rival.debt <= floor) {
                    rival = {};
                    break;
                }
                drawn_.push_back(debtors_.remove_largest());
                double weight = ledger_.heaviest_weight(rival.group, t);
                claim(rival.group, rival.debt, 1.0 / (weight * per_block_), floor);
                rival = debtors_.largest(t);
            }
            if (claims_.empty()) break;
            Claim payer = claims_.drop();
            double others = std::max(claims_.empty() ? 0.0 : claims_.front().p, rival.debt);
            others = std::max(others, floor - EPSILON);
            double alone = std::ceil((payer.p - others - 2 * EPSILON) / payer.step);
            size_t before = victims.size(), paid = 0;
            if (rule.calls_in_debts) {
                double most = std::min<double>(count - before, std::max(1.0, alone));
                lose(payer.group, before + size_t(most), victims);
                paid = victims.size() - before;
            } else if (int queue = next(); queue != NONE) {
                int near = as_old(queue, payer.group);
                take_from(near == NONE ? queue : near, 1, LAST, victims);
                paid = near != NONE;
            }
            claim(payer.group, payer.p - paid * payer.step, payer.step, floor);
        }
        debtors_.restore(drawn_);
    }
    int next() {
        for (;;) {
            int queue = turn(NONE, 1).queue;
            if (queue == NONE || !spares(queue)) return queue;
            give_chance(queue);
        }
    }
    int as_old(int queue, int group) {
        auto [unproven, proven] = heads(group);
        int own = is_proven(queue) ? proven : unproven;
        if (own == NONE || head(own) > head(queue) + 0.03 * capacity || spares(own)) return NONE;
        return own;
    }
};

class Ghosts {
    struct Ghost {
        Key key;
        uint32_t maker;
        int next, prev;
    };
    struct Group {
        int first = NONE, last = NONE, size = 0, bound = 0, number = NONE;
    };
    int limit_, count_ = 0, free_ = NONE;
    Vec<Ghost> ghosts_;
    Index<Ghost> index_;
    Vec<Group> groups_;
    Vec<int> numbered_;  // groups, in the order in which they had their first ghosts
    Heap<std::pair<int, int>> heap_;

   public:
    Ghosts(int64_t capacity, size_t groups) : limit_(std::max(1, int(0.9 * capacity))) {
        ghosts_.reserve(limit_ + 1);
        groups_.reserve(groups);
    }
    void remember(int group, Key key, uint32_t maker) {
        if (size_t(group) >= groups_.size()) groups_.resize(group + 1);
        Group& own = groups_[group];
        if (own.number == NONE) {
            own.number = numbered_.size();
            numbered_.push_back(group);
        }
        int place = index_.find(ghosts_, key);
        if (place != NONE) {
            unlink(own, place);
            push_back(own, place, maker);
            return;
        }
        if (free_ == NONE) {
            place = ghosts_.size();
            ghosts_.push_back({key, maker, NONE, NONE});
        } else {
            place = free_;
            free_ = ghosts_[place].next;
            ghosts_[place].key = key;
        }
        index_.insert(ghosts_, place);
        push_back(own, place, maker);
        if (own.size > own.bound) {
            own.bound = own.size + 8;
            heap_.add({-own.bound, own.number});
            if (heap_.size() > 2 * numbered_.size() + 16) {
                heap_.clear();
                for (int g : numbered_) heap_.push_back({-groups_[g].bound, groups_[g].number});
                heap_.heapify();
            }
        }
        if (++count_ > limit_) {
            bool poor = int64_t(own.size) * int64_t(numbered_.size()) <= limit_;
            Group& loser = poor ? largest() : own;
            lay(loser, loser.first);
        }
    }
    bool recall(int group, Key key, uint32_t& maker) {
        int place = size_t(group) < groups_.size() ? index_.find(ghosts_, key) : NONE;
        if (place == NONE) return false;
        maker = ghosts_[place].maker;
        lay(groups_[group], place);
        return true;
    }

   private:
    void push_back(Group& own, int place, uint32_t maker) {
        Ghost& ghost = ghosts_[place];
        ghost = {ghost.key, maker, NONE, own.last};
        (own.last == NONE ? own.first : ghosts_[own.last].next) = place;
        own.last = place;
        ++own.size;
    }
    void unlink(Group& own, int place) {
        Ghost& ghost = ghosts_[place];
        (ghost.prev == NONE ? own.first : ghosts_[ghost.prev].next) = ghost.next;
        (ghost.next == NONE ? own.last : ghosts_[ghost.next].prev) = ghost.prev;
        --own.size;
    }
    void lay(Group& own, int place) {
        unlink(own, place);
        index_.erase(ghosts_, place);
        ghosts_[place].next = free_;
        free_ = place;
        --count_;
    }
    Group& largest() {
        for (;;) {
            auto [bound, number] = heap_.front();
            Group& group = groups_[numbered_[number]];
            if (group.bound == -bound && group.size >= group.bound) return group;
            heap_.drop();
            if (group.bound == -bound) {
                group.bound = group.size;
                heap_.add({-group.bound, number});
            }
        }
    }
};

class Chains {
    enum : uint8_t { REACHABLE = 1, COPIED = 2 };
    struct Link {
        Key key;
        int block = NONE, parent = NONE, child = NONE;  // children: the latest first
        int next, prev;                                 // siblings
        uint8_t flags = REACHABLE;
    };
    using Copies = std::unordered_map<int, Vec<int>, std::hash<int>, std::equal_to<int>,
                                      Traced<std::pair<const int, Vec<int>>>>;
    Vec<Link> links_;
    Index<Link> index_;
    Copies copies_;
    Vec<int> todo_;
    int free_ = NONE;

   public:
    bool broken = false;

    explicit Chains(size_t capacity) { links_.reserve(capacity); }
    Key key(int link) const { return links_[link].key; }
    bool is_orphan(int link) const { return !(links_[link].flags & REACHABLE); }
    bool is_copied(int link) const { return links_[link].flags & COPIED; }
    int lookup(Key key) const {  // the block cached first under a key
        int link = index_.find(links_, key);
        return link == NONE ? NONE : links_[link].block;
    }
    int add(int block, Key key, const Key* parent, Vec<int>& turned) {
        int number = find_or_make(key);
        if (links_[number].block != NONE) {
            copies_[number].push_back(block);
            links_[number].flags |= COPIED;
            return number;
        }
        links_[number].block = block;
        links_[number].flags |= REACHABLE;
        if (parent != nullptr) {
            int before = find_or_make(*parent);
            Link &link = links_[number], &above = links_[before];
            link.parent = before;
            link.next = above.child;
            link.prev = NONE;
            if (above.child != NONE) links_[above.child].prev = number;
            above.child = number;
            if (above.block == NONE || !(above.flags & REACHABLE)) {
                link.flags &= ~REACHABLE;
                broken = true;
                return number;
            }
        }
        turn(number, REACHABLE, turned);
        return number;
    }
    void remove(int number, int block, Vec<int>& turned) {
        Link& link = links_[number];
        if (link.flags & COPIED) {
            Vec<int>& copies = copies_[number];
            auto gone = link.block == block ? copies.begin()
                                            : std::find(copies.begin(), copies.end(), block);
            if (link.block == block) link.block = *gone;
            copies.erase(gone);
            if (copies.empty()) {
                copies_.erase(number);
                link.flags &= ~COPIED;
            }
            return;
        }
        link.block = NONE;
        if (int before = link.parent; before != NONE) {
            link.parent = NONE;
            (link.prev == NONE ? links_[before].child : links_[link.prev].next) = link.next;
            if (link.next != NONE) links_[link.next].prev = link.prev;
            if (links_[before].block == NONE && links_[before].child == NONE) forget(before);
        }
        if (link.child == NONE) return forget(number);
        broken = true;
        turn(number, 0, turned);
    }

   private:
    int find_or_make(Key key) {
        int number = index_.find(links_, key);
        if (number != NONE) return number;
        Link fresh{key};
        if (free_ == NONE) {
            number = links_.size();
            links_.push_back(fresh);
        } else {
            number = free_;
            free_ = links_[number].next;
            links_[number] = fresh;
        }
        index_.insert(links_, number);
        return number;
    }
    void forget(int number) {
        index_.erase(links_, number);
        links_[number].next = free_;
        free_ = number;
    }
    void push_children(int number) {
        size_t from = todo_.size();
        for (int i = links_[number].child; i != NONE; i = links_[i].next) todo_.push_back(i);
        std::reverse(todo_.begin() + from, todo_.end());
    }
    void turn(int above, uint8_t reachable, Vec<int>& turned) {
        todo_.clear();
        push_children(above);
        while (!todo_.empty()) {
            int number = todo_.back();
            todo_.pop_back();
            Link& link = links_[number];
            if ((link.flags & REACHABLE) == reachable) continue;
            link.flags ^= REACHABLE;
            turned.push_back(link.block);
            if (link.flags & COPIED)
                turned.insert(turned.end(), copies_[number].begin(), copies_[number].end());
            push_children(number);
        }
    }
};

class Miniature {
    struct Entry {
        Key key;
    };
    size_t capacity_, resident_ = 0;
    Vec<Entry> entries_;  // by slot
    Index<Entry> index_;
    Vec<int> free_, slots_, missing_;
    Victims victims_;
    Ghosts ghosts_;

   public:
    Order order;
    double value = 0.0, served = 0.0;

    Miniature(size_t capacity, Ledger& ledger, Rule rule, double rate)
        : capacity_(capacity), entries_(capacity), ghosts_(capacity, 0),
          order(capacity, capacity, ledger, rule, rate) {
        for (size_t slot = capacity; slot-- > 0;) free_.push_back(slot);
    }
    void serve(int group, const Vec<Key>& all, double t, double weights[2], double gain) {
        int hits[2] = {0, 0};
        size_t count = std::min(all.size(), capacity_);
        slots_.assign(count, NONE);
        missing_.clear();
        for (size_t i = 0; i < count; ++i) {
            int slot = slots_[i] = index_.find(entries_, all[i]);
            if (slot == NONE) {
                missing_.push_back(i);
                continue;
            }
            order.remove(slot);
            if (!missing_.empty()) continue;
            ++hits[order.queue_of(slot) % CLASSES != PROBATIONARY];
            order.reuse(slot, false);
        }
        if (resident_ + missing_.size() > capacity_) {
            victims_.clear();
            order.take(resident_ + missing_.size() - capacity_, t, victims_);
            for (Victim victim : victims_) {
                if (victim.unproven())
                    ghosts_.remember(victim.queue / CLASSES, entries_[victim.block].key, 0);
                index_.erase(entries_, victim.block);
                free_.push_back(victim.block);
            }
        }
        resident_ = std::min(capacity_, resident_ + missing_.size());
        for (int i : missing_) {
            int slot = slots_[i] = free_.back();
            free_.pop_back();
            entries_[slot].key = all[i];
            index_.insert(entries_, slot);
            uint32_t nobody;
            order.admit(slot, group, ghosts_.recall(group, all[i], nobody));
        }
        order.append(slots_.rbegin(), slots_.rend());
        value += gain * (weights[0] * hits[0] + weights[1] * hits[1]);
        served += gain * (hits[0] + hits[1]);
    }
};

class Trial {
    Vec<std::unique_ptr<Miniature>> miniatures_;
    Miniature* best_;
    double memory_, gain_ = 1.0;

   public:
    double sampled_below;

    Trial(int64_t capacity, Ledger& ledger, const Vec<Rule>& rules) {
        int64_t size = std::min<int64_t>(capacity, 512);
        double rate = double(size) / std::max<int64_t>(1, capacity);
        memory_ = 16.0 * capacity;
        sampled_below = rate * 4294967296.0;
        for (Rule rule : rules)
            miniatures_.push_back(std::make_unique<Miniature>(size, ledger, rule, rate));
        best_ = miniatures_[0].get();
    }
    Rule rule() const { return best_->order.rule; }
    double proven_part() const { return best_->order.proven_part(); }
    void add_groups(size_t groups) {
        for (auto& one : miniatures_) one->order.add_groups(groups);
    }
    void charged(int group, double t) {
        for (auto& one : miniatures_)
            if (one->order.rule.calls_in_debts) one->order.charged(group, t);
    }
    void serve(int group, const Vec<Key>& keys, size_t accesses, double t, double discount) {
        gain_ *= std::exp(accesses / memory_);
        double weights[2] = {1 - discount, 1.0};
        for (auto& one : miniatures_) one->serve(group, keys, t, weights, gain_);
        decide();
        if (gain_ <= 1e100) return;
        for (auto& one : miniatures_) {
            one->value /= gain_;
            one->served /= gain_;
        }
        gain_ = 1.0;
    }

   private:
    void decide() {
        double best[2] = {0.0, 0.0};
        for (auto& one : miniatures_) {
            double& own = best[one->order.rule.calls_in_debts];
            own = std::max(own, one->value);
        }
        bool calls = rule().calls_in_debts;
        if (best[!calls] > best[calls]) calls = !calls;
        Miniature* most = nullptr;
        for (auto& one : miniatures_)
            if (one->order.rule.calls_in_debts == calls && (!most || one->served > most->served))
                most = one.get();
        if (rule().calls_in_debts != calls || most->served > best_->served) best_ = most;
    }
};

class Core {
    struct Origin {
        uint32_t maker, terms;
        int link = NONE;  // NONE: not cached
        bool sampled = false;
    };
    Vec<Origin> origins_;
    Chains chains_;
    Ghosts ghosts_;
    Vec<int> turned_, kept_, lost_;
    Vec<Key> keys_;
    size_t groups_;

   public:
    Ledger ledger;
    Trial trial;
    Order order;
    Victims victims;
    long long orphans_evicted = 0, promotions_denied = 0;

    Core(int64_t capacity, int64_t usable, double lowest_rate, const Vec<Rule>& rules,
         size_t groups)
        : origins_(capacity), chains_(capacity), ghosts_(usable, groups), groups_(groups),
          ledger(lowest_rate, groups), trial(usable, ledger, rules),
          order(capacity, usable, ledger, rules[0], 1.0) {
        order.add_groups(groups);
        trial.add_groups(groups);
    }

    size_t capacity() const { return origins_.size(); }
    int lookup(Key key) const { return chains_.lookup(key); }
    int open(int group, double rate, double burst) {
        if (size_t(group) >= groups_) {
            groups_ = group + 1;
            order.add_groups(groups_);
            trial.add_groups(groups_);
        }
        return ledger.open(group, rate, burst);
    }
    static uint32_t terms(int account, int64_t prefix) { return key_of(account, prefix); }

    struct New {
        int block;
        Key key, parent;
        bool has_parent, sampled;
    };
    void materialise(const Vec<New>& blocks, int number, uint32_t maker, uint32_t terms, double t) {
        t = ledger.now(t);
        Account& account = ledger.account(number);
        int group = account.group;
        ledger.charge(account, blocks.size(), t);
        order.charged(group, t);
        trial.charged(group, t);
        double until = order.rule.proven_share == 0 ? 0.0
                                                    : 0.9 * trial.proven_part() * order.capacity;
        for (const New& one : blocks) {
            if (origins_[one.block].link != NONE) lose(one.block);
            uint32_t made_by = maker;
            ghosts_.recall(group, one.key, made_by);
            order.admit(one.block, group, made_by != maker || order.proven < until);
            turned_.clear();
            int link = chains_.add(one.block, one.key, one.has_parent ? &one.parent : nullptr,
                                   turned_);
            origins_[one.block] = {maker, terms, link, one.sampled};
            if (turned_.empty()) continue;
            kept_.clear();
            for (int block : turned_)
                if (order.is_orphaned(block)) {
                    order.remove(block);
                    kept_.push_back(block);
                }
            order.append(kept_.begin(), kept_.end());
        }
    }
    template <class Promoted>
    void hit(const Vec<int>& blocks, int number, uint32_t maker, uint32_t terms, double t,
             Promoted promoted) {
        t = ledger.now(t);
        bool owes = ledger.raw_debt(ledger.account(number).group, t) > EPSILON;
        for (int block : blocks) {
            const Origin& origin = origins_[block];
            if (origin.link == NONE || origin.maker == maker) continue;
            bool earned = origin.terms == terms;
            if (order.reuse(block, earned && !owes)) promoted(block);
            else if (earned && owes && order.queue_of(block) % CLASSES != REUSE) ++promotions_denied;
        }
    }
    void hold(const Vec<int>& blocks) {
        for (int block : blocks) order.remove(block);
    }
    void release(const Vec<int>& blocks) {
        if (chains_.broken) {
            kept_.clear();
            for (int block : blocks) {
                if (chains_.is_orphan(origins_[block].link)) order.orphan(block);
                else kept_.push_back(block);
            }
            order.append(kept_.begin(), kept_.end());
        } else {
            order.append(blocks.begin(), blocks.end());
        }
        try_out(blocks);
    }
    void evict(size_t count, double t) {
        t = ledger.now(t);
        victims.clear();
        order.take_orphans(count, victims);
        orphans_evicted += victims.size();
        order.take(count, t, victims);
        for (Victim victim : victims) {
            const Origin& origin = origins_[victim.block];
            if (victim.unproven())
                ghosts_.remember(victim.queue / CLASSES, chains_.key(origin.link), origin.maker);
        }
        for (Victim victim : victims) lose(victim.block);
    }
    void forget(int block) {
        order.remove(block);
        lose(block);
    }

   private:
    void lose(int block) {
        order.drop(block);
        turned_.clear();
        chains_.remove(origins_[block].link, block, turned_);
        origins_[block].link = NONE;
        for (int orphan : turned_)
            if (order.is_queued(orphan)) {
                order.remove(orphan);
                order.orphan(orphan);
            }
    }
    void try_out(const Vec<int>& blocks) {
        keys_.clear();
        int group = NONE;
        for (size_t i = blocks.size(); i-- > 0;)
            if (const Origin& origin = origins_[blocks[i]]; origin.sampled) {
                if (group == NONE) group = order.queue_of(blocks[i]) / CLASSES;
                Key key = chains_.key(origin.link);
                if (!chains_.is_copied(origin.link) ||
                    std::find(keys_.begin(), keys_.end(), key) == keys_.end())
                    keys_.push_back(key);
            }
        if (keys_.empty()) return;
        double t = ledger.time, debt = ledger.normalised_debt(group, t);
        double excess = debt - ledger.mean_debt_of_others(group, t);
        double discount = excess > EPSILON ? excess / std::max(debt, order.largest_debt(t)) : 0.0;
        trial.serve(group, keys_, blocks.size(), t, discount);
        order.rule = trial.rule();
    }
};

// ---- Python's view of it. Blocks are lists of ints; hashes, requests and prefixes are any hashable.

struct Object {
    PyObject_HEAD;
    Core* core;
    Vec<int>* blocks;
    Vec<Core::New>* made;
};
struct PythonError {};  // the error indicator is set
using Arguments = PyObject* const*;

PyObject* checked(PyObject* object) {
    if (object == nullptr) throw PythonError();
    return object;
}
int64_t hash_of(PyObject* object) {
    int64_t hash = PyObject_Hash(object);
    if (hash == -1 && PyErr_Occurred()) throw PythonError();
    return hash;
}
int64_t integer(PyObject* object) {
    int64_t number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred()) throw PythonError();
    return number;
}
double real(PyObject* object) {
    double number = PyFloat_AsDouble(object);
    if (number == -1.0 && PyErr_Occurred()) throw PythonError();
    return number;
}
uint32_t maker_of(PyObject* request) { return key_of(0, hash_of(request)); }

class Items {  // of a list or a tuple
    PyObject* fast_;

   public:
    explicit Items(PyObject* sequence)
        : fast_(checked(PySequence_Fast(sequence, "expected a sequence"))) {}
    ~Items() { Py_DECREF(fast_); }
    Items(const Items&) = delete;
    size_t size() const { return PySequence_Fast_GET_SIZE(fast_); }
    PyObject* operator[](size_t i) const { return PySequence_Fast_GET_ITEM(fast_, i); }
};

int block_of(const Object* self, PyObject* item) {
    int64_t block = integer(item);
    if (block < 0 || size_t(block) >= self->core->capacity())
        throw std::out_of_range("block: expected a number below the pool's capacity");
    return block;
}
const Vec<int>& blocks_of(const Object* self, PyObject* sequence) {
    Items items(sequence);
    self->blocks->clear();
    for (size_t i = 0; i < items.size(); ++i) self->blocks->push_back(block_of(self, items[i]));
    return *self->blocks;
}
uint32_t crc_of(PyObject* hash) {  // what Trial.samples goes by
    if (PyBytes_Check(hash))
        return crc32(0, (const Bytef*)PyBytes_AS_STRING(hash), PyBytes_GET_SIZE(hash));
    PyObject* text = checked(PyObject_Repr(hash));
    Py_ssize_t size;
    const char* name = PyUnicode_AsUTF8AndSize(text, &size);
    uint32_t crc = name == nullptr ? 0 : crc32(0, (const Bytef*)name, size);
    Py_DECREF(text);
    return crc;
}
bool is_sampled(const Core& core, PyObject* hash) {
    double below = core.trial.sampled_below;
    return below >= 4294967296.0 || crc_of(hash) < below;
}

// Runs a method; C++ exceptions become Python's.
template <class Method>
PyObject* guarded(Method method) {
    try {
        return method();
    } catch (const PythonError&) {
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    }
    return nullptr;
}
PyObject* none() { Py_RETURN_NONE; }

void expect(Py_ssize_t found, Py_ssize_t expected) {
    if (found != expected) throw std::invalid_argument("wrong number of arguments");
}

// open(group, refill_rate, burst) -> account
PyObject* open(Object* self, Arguments given, Py_ssize_t count) {
    return guarded([&] {
        expect(count, 3);
        return PyLong_FromLong(self->core->open(integer(given[0]), real(given[1]), real(given[2])));
    });
}
// materialise(blocks, hashes, parents or None, account, request, prefix, time)
PyObject* materialise(Object* self, Arguments given, Py_ssize_t count) {
    return guarded([&] {
        expect(count, 7);
        Core& core = *self->core;
        int account = integer(given[3]), group = core.ledger.accounts.at(account).group;
        Items blocks(given[0]), hashes(given[1]);
        std::unique_ptr<Items> parents;
        if (given[2] != Py_None) parents = std::make_unique<Items>(given[2]);
        if (hashes.size() != blocks.size() || (parents && parents->size() != blocks.size()))
            throw std::invalid_argument("expected a hash and a parent for every block");
        Vec<Core::New>& made = *self->made;
        made.clear();
        for (size_t i = 0; i < blocks.size(); ++i) {
            PyObject* parent = parents ? (*parents)[i] : Py_None;
            bool has = parent != Py_None;
            made.push_back({block_of(self, blocks[i]), key_of(group, hash_of(hashes[i])),
                            has ? key_of(group, hash_of(parent)) : 0, has,
                            is_sampled(core, hashes[i])});
        }
        core.materialise(made, account, maker_of(given[4]),
                         Core::terms(account, hash_of(given[5])), real(given[6]));
        return none();
    });
}
// hit(blocks, account, request, prefix, time) -> blocks promoted
PyObject* hit(Object* self, Arguments given, Py_ssize_t count) {
    return guarded([&] {
        expect(count, 5);
        int account = integer(given[1]);
        PyObject* promoted = checked(PyList_New(0));
        self->core->hit(blocks_of(self, given[0]), account, maker_of(given[2]),
                        Core::terms(account, hash_of(given[3])), real(given[4]), [&](int block) {
                            PyObject* number = PyLong_FromLong(block);
                            PyList_Append(promoted, number);
                            Py_DECREF(number);
                        });
        return promoted;
    });
}
PyObject* hold(Object* self, PyObject* blocks) {
    return guarded([&] { return self->core->hold(blocks_of(self, blocks)), none(); });
}
PyObject* release(Object* self, PyObject* blocks) {
    return guarded([&] { return self->core->release(blocks_of(self, blocks)), none(); });
}
PyObject* forget(Object* self, PyObject* block) {
    return guarded([&] { return self->core->forget(block_of(self, block)), none(); });
}
// evict(count, time) -> victims
PyObject* evict(Object* self, Arguments given, Py_ssize_t found) {
    return guarded([&] {
        expect(found, 2);
        Core& core = *self->core;
        int64_t count = integer(given[0]);
        if (count < 0 || count > core.order.queued + core.order.orphaned)
            throw std::invalid_argument("asked for more victims than there are candidates");
        core.evict(count, real(given[1]));
        PyObject* victims = checked(PyList_New(count));
        for (int64_t i = 0; i < count; ++i)
            PyList_SET_ITEM(victims, i, PyLong_FromLong(core.victims[i].block));
        return victims;
    });
}
// replay([(account, request, time, blocks that may hit, hashes)]) -> (queried, hit, evicted):
// sim.replay's serial replay of a pool without requests that overlap, the loop included. Hashes are
// ints. The pool's own lookup is that of the chains.
PyObject* replay(Object* self, PyObject* requests) {
    return guarded([&] {
        Core& core = *self->core;
        Items all(requests);
        size_t used = 0;
        long long queried = 0, hits = 0, evicted = 0;
        Vec<int> blocks, reversed;
        Vec<Core::New> made;
        for (size_t r = 0; r < all.size(); ++r) {
            Items request(all[r]), hashes(request[4]);
            if (hashes.size() > core.capacity()) continue;
            int account = integer(request[0]), group = core.ledger.accounts.at(account).group;
            uint32_t maker = maker_of(request[1]), terms = Core::terms(account, hash_of(Py_None));
            double t = real(request[2]);
            size_t reusable = integer(request[3]), found = 0;
            Key before = 0;
            blocks.clear();
            made.clear();
            for (size_t i = 0; i < hashes.size(); ++i) {
                Key key = key_of(group, hash_of(hashes[i]));
                int block = found == i && i < reusable ? core.lookup(key) : NONE;
                if (block != NONE) blocks.push_back(block), ++found;
                else made.push_back({NONE, key, before, i > 0, is_sampled(core, hashes[i])});
                before = key;
            }
            core.hold(blocks);
            core.hit(blocks, account, maker, terms, t, [](int) {});
            size_t fresh = std::min(made.size(), core.capacity() - used);
            core.evict(made.size() - fresh, t);
            for (size_t i = 0; i < made.size(); ++i) {
                made[i].block = i < fresh ? int(used++) : core.victims[i - fresh].block;
                blocks.push_back(made[i].block);
            }
            if (!made.empty()) core.materialise(made, account, maker, terms, t);
            reversed.assign(blocks.rbegin(), blocks.rend());
            core.release(reversed);
            queried += hashes.size();
            hits += found;
            evicted += made.size() - fresh;
        }
        return Py_BuildValue("LLL", queried, hits, evicted);
    });
}

PyObject* candidates(Object* self, void*) {
    return PyLong_FromLongLong(self->core->order.queued + self->core->order.orphaned);
}
PyObject* orphans(Object* self, void*) { return PyLong_FromLongLong(self->core->orphans_evicted); }
PyObject* denied(Object* self, void*) { return PyLong_FromLongLong(self->core->promotions_denied); }

// Core(capacity, usable blocks, lowest refill rate, [(proven share, calls in debts)], groups)
PyObject* create(PyTypeObject* type, PyObject* given, PyObject*) {
    return guarded([&] {
        long long capacity, usable, groups;
        double lowest_rate;
        PyObject* list;
        if (!PyArg_ParseTuple(given, "LLdOL", &capacity, &usable, &lowest_rate, &list, &groups))
            throw PythonError();
        Vec<Rule> rules;
        Items items(list);
        for (size_t i = 0; i < items.size(); ++i) {
            Items rule(items[i]);
            rules.push_back({real(rule[0]), integer(rule[1]) != 0});
        }
        auto* self = (Object*)checked(type->tp_alloc(type, 0));
        self->core = new Core(capacity, usable, lowest_rate, rules, groups);
        self->blocks = new Vec<int>();
        self->made = new Vec<Core::New>();
        return (PyObject*)self;
    });
}
void destroy(Object* self) {
    delete self->core;
    delete self->blocks;
    delete self->made;
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

template <class Function>
PyCFunction method(Function* function) { return (PyCFunction)(void (*)(void))function; }

PyMethodDef methods[] = {{"open", method(open), METH_FASTCALL, nullptr},
                         {"materialise", method(materialise), METH_FASTCALL, nullptr},
                         {"hit", method(hit), METH_FASTCALL, nullptr},
                         {"hold", method(hold), METH_O, nullptr},
                         {"release", method(release), METH_O, nullptr},
                         {"forget", method(forget), METH_O, nullptr},
                         {"evict", method(evict), METH_FASTCALL, nullptr},
                         {"replay", method(replay), METH_O, nullptr},
                         {}};
PyGetSetDef properties[] = {{"candidate_count", (getter)candidates, nullptr, nullptr, nullptr},
                            {"orphans_evicted", (getter)orphans, nullptr, nullptr, nullptr},
                            {"promotions_denied", (getter)denied, nullptr, nullptr, nullptr},
                            {}};
PyType_Slot slots[] = {{Py_tp_new, (void*)create},
                       {Py_tp_dealloc, (void*)destroy},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, properties},
                       {}};
PyType_Spec spec = {"shield_core.Core", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "shield_core", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_shield_core() {
    PyObject* made = PyModule_Create(&module);
    PyObject* type = PyType_FromSpec(&spec);
    if (made == nullptr || type == nullptr || PyModule_AddObject(made, "Core", type) < 0) return nullptr;
    return made;
}
