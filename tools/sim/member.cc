#include "tools/sim/member.h"

#include <algorithm>

namespace millrace::sim {

using host::Communicator;

void ExactCounts::add(const ExactCounts& o) {
  for (size_t i = 0; i < collective.size(); i++) collective[i] += o.collective[i];
  for (size_t i = 0; i < type.size(); i++) type[i] += o.type[i];
  for (size_t i = 0; i < op.size(); i++) op[i] += o.op[i];
  bfp += o.bfp, deterministic += o.deterministic;
  combined += o.combined, alone += o.alone, modelled += o.modelled;
}

const std::vector<uint8_t>& GroupRun::expected_of(size_t operation) {
  expected.resize(plan->operations.size());
  const OperationPlan& o = plan->operations[operation];
  if (expected[operation].empty() && check::vector_bytes(o.reduction) != 0)
    expected[operation] = check::expected_result(o.reduction);
  return expected[operation];
}

bool GroupRun::settled() const {
  return std::all_of(members.begin(), members.end(), [](auto& m) { return m->over(); });
}

Member::Member(GroupRun& group, uint16_t rank, Fabric& fabric, Arena& arena, Judges& judges)
    : group_(group),
      plan_(*group.plan),
      rank_(rank),
      host_(plan_.hosts[rank]),
      fabric_(fabric),
      arena_(arena),
      judges_(judges),
      random_(fabric.draw()) {}

Member::~Member() = default;

void Member::join_at(Time when) {
  if (!over()) return;
  joining_ = true;
  fabric_.network().at(when, [this] { join(); });
}

void Member::join() {
  if (!joining_) return;
  joining_ = false;
  Host& host = fabric_.host(host_);
  if (communicator_ != nullptr || host.crashed()) return;
  host::CommunicatorConfig c;
  c.key.fill(static_cast<uint8_t>(plan_.number + 1));
  c.rank = rank_;
  c.world = plan_.world;
  c.stripes = plan_.stripes;
  c.switch_address = fabric_.address(plan_.tree ? fabric_.leaf_of(host_) : plan_.where, plan_.v6);
  c.tenant = plan_.tenant;
  c.secret = plan_.secret;
  c.combine = plan_.combine;
  c.join_timeout = std::chrono::seconds(20);
  generation_ = group_.generation;
  instance_++;
  next_ = 0;
  leaving_ = false;
  communicator_ = &host.join(c);
  judges_.outcome.joined(plan_.number, rank_, instance_);
  plan_next();
}

// When the next operation is called.
void Member::plan_next() {
  next_at_ = fabric_.now() +
             Time(static_cast<int64_t>(random_.below(static_cast<uint64_t>(plan_.gap_max.count()) + 1)));
  if (next_ == delayed_) next_at_ += delay_, delayed_ = UINT32_MAX;
  Host& host = fabric_.host(host_);
  fabric_.network().at(next_at_, [this, &host] { fabric_.network().touch(host); });
}

size_t Member::add_buffer(const check::Reduction& r, uint64_t bytes, const char* what) {
  const uint64_t guard = check::MemoryCheck::kGuard;
  const uint64_t skew = check::element_bytes(r.type) * random_.below(8);
  return judges_.memory.add(arena_.take(bytes + 2 * guard, skew) + guard, bytes,
                            "group " + std::to_string(plan_.number) + " rank " + std::to_string(rank_) +
                                " instance " + std::to_string(instance_) + " operation " +
                                std::to_string(next_) + " (" +
                                std::string(check::collective_name(r.collective)) + ") " + what + " buffer");
}

// Buffers of just the size that the rank needs, none where it needs none, and what in them may not change.
void Member::add_buffers(Running& r, bool in_place) {
  const check::Reduction& x = r.reduction;
  host::Operation& op = *r.operation;
  const uint64_t give = check::contribution_bytes(x, rank_), get = check::result_bytes(x, rank_);
  check::MemoryCheck& memory = judges_.memory;
  if (in_place && give != 0 && get != 0) {
    const size_t buffer = add_buffer(x, std::max(give, get), "only");
    uint8_t* base = memory.base(buffer);
    op.send = base + (x.collective == check::kAllGather ? rank_ * give : 0);
    op.recv = base + (x.collective == check::kReduceScatter ? rank_ * get : 0);
    check::fill_contribution(x, rank_, const_cast<uint8_t*>(op.send));
    const uint64_t at = rank_ * std::min(give, get);
    if (x.collective == check::kBroadcast)
      memory.offered(buffer, {{0, give}});
    else if (x.collective == check::kAllGather)
      memory.offered(buffer, {{at, at + give}});
    else if (x.collective == check::kReduceScatter)
      memory.offered(buffer, {{0, at}, {at + get, give}});
    else
      memory.offered(buffer, {});
    r.buffers = {buffer};
    return;
  }
  if (give != 0) {
    r.buffers.push_back(add_buffer(x, give, "send"));
    uint8_t* base = memory.base(r.buffers.back());
    check::fill_contribution(x, rank_, base);
    memory.offered(r.buffers.back(), {{0, give}});
    op.send = base;
  }
  if (get != 0) {
    r.buffers.push_back(add_buffer(x, get, "receive"));
    memory.offered(r.buffers.back(), {});
    op.recv = memory.base(r.buffers.back());
  }
}

// Something that members must agree on becomes another; what is asked for stays valid in itself.
void Member::make_disagree(check::Reduction& r, bool& deterministic) {
  const uint64_t kind = random_.below(5);
  if (kind == 0 && r.has_root()) {
    r.root = (r.root + 1 + static_cast<uint32_t>(random_.below(r.world - 1))) % r.world;
  } else if (kind == 1 && r.reduces()) {
    deterministic = !deterministic;
  } else if (kind == 4 && r.bfp) {
    r.bfp = false;
  } else if (kind == 2 || r.count < 2 * r.world) {
    // Any other; a vector that does not fall into shards is not asked to.
    const int before = r.collective;
    do r.collective = static_cast<int>(random_.between(check::kAllReduce, check::kBarrier));
    while (r.collective == before || (r.has_shards() && r.count % r.world != 0));
    if (!r.has_root()) r.root = 0;
    if (!r.reduces()) deterministic = r.bfp = false;
    if (r.collective == check::kBarrier) r.count = 0;
  } else {
    r.count -= r.world;
  }
}

void Member::submit() {
  const OperationPlan& o = plan_.operations[next_];
  Running r;
  r.number = next_;
  r.reduction = o.reduction;
  bool deterministic = o.deterministic;
  if (disagree_) make_disagree(r.reduction, deterministic);
  disagree_ = false;
  const check::Reduction& x = r.reduction;
  r.operation = std::make_unique<host::Operation>();
  host::Operation& op = *r.operation;
  op.collective = static_cast<aggregation::Collective>(x.collective);
  op.type = x.collective == check::kBarrier ? aggregation::DataType::kU8
                                            : static_cast<aggregation::DataType>(x.type);
  op.op = x.reduces() ? static_cast<aggregation::ReduceOp>(x.op) : aggregation::ReduceOp::kNone;
  op.root = static_cast<uint16_t>(x.root);
  op.bfp = x.bfp;
  op.deterministic = deterministic;
  op.bytes = check::vector_bytes(x);
  add_buffers(r, o.in_place);
  judges_.outcome.submitted(plan_.number, rank_, instance_, next_);
  communicator_->submit(&op, clock());
  fabric_.network().touch(fabric_.host(host_));
  running_.push_back(std::move(r));
  next_++;
  plan_next();
}

void Member::give_back(const Running& r) {
  for (const size_t buffer : r.buffers) judges_.memory.returned(buffer, now_ns());
}

void Member::count(const OperationPlan& o) {
  ExactCounts& e = judges_.exact;
  const check::Reduction& r = o.reduction;
  e.collective[static_cast<size_t>(r.collective)]++;
  if (r.reduces()) e.type[static_cast<size_t>(r.type)]++, e.op[static_cast<size_t>(r.op)]++;
  e.bfp += r.bfp;
  e.deterministic += o.deterministic;
  const auto here = std::count(plan_.hosts.begin(), plan_.hosts.end(), host_);
  e.combined += plan_.combine && here > 1;
  e.alone += plan_.combine && here == plan_.world;
  e.modelled += fabric_.host(host_).config().nic != nullptr;
}

void Member::finish(Running& r) {
  const host::Operation& op = *r.operation;
  const check::Reduction& agreed = plan_.operations[r.number].reduction;
  judges_.trace.number(static_cast<uint64_t>(now_ns()));
  judges_.trace.number(plan_.number << 16 | rank_);
  judges_.trace.number(uint64_t{r.number} << 8 | static_cast<uint64_t>(op.status));
  judges_.trace.bytes({reinterpret_cast<const uint8_t*>(op.text.data()), op.text.size()});
  if (op.status == MR_OK) {
    count(plan_.operations[r.number]);
    const std::string wrong =
        r.reduction != agreed || op.deterministic != plan_.operations[r.number].deterministic
            ? "it succeeded, though this rank disagreed with the others"
            : check::explain_difference(agreed, rank_, group_.expected_of(r.number),
                                        {op.recv, check::result_bytes(agreed, rank_)});
    if (!wrong.empty())
      judges_.violations.add("sum", now_ns(),
                             "group " + std::to_string(plan_.number) + " rank " + std::to_string(rank_) +
                                 " operation " + std::to_string(r.number) + ": " + wrong);
  }
  judges_.outcome.ended(now_ns(), plan_.number, rank_, instance_, r.number, op.status, op.text);
  give_back(r);
}

void Member::step(Time) {
  if (communicator_ == nullptr) return;
  // What has succeeded did so before anything failed, though both may have come in one turn.
  std::stable_partition(running_.begin(), running_.end(),
                        [](const auto& r) { return r.operation->done && r.operation->status == MR_OK; });
  for (size_t i = 0; i < running_.size();) {
    if (!running_[i].operation->done) {
      i++;
      continue;
    }
    finish(running_[i]);
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(i));
  }
  const Communicator::State state = communicator_->state();
  if (state == Communicator::State::kFailed) return end(communicator_->status(), communicator_->text());
  if (state == Communicator::State::kClosed)
    return end(leaving_ ? MR_OK : communicator_->status(), communicator_->text());
  if (leaving_) return;
  const bool may =
      state == Communicator::State::kRunning || rank_ % 2 == 0;  // some call before all are there
  while (may && next_ < plan_.operations.size() && running_.size() < plan_.in_flight &&
         fabric_.now() >= next_at_)
    submit();
  if (next_ == plan_.operations.size() && running_.empty() && state == Communicator::State::kRunning) leave();
}

void Member::leave() {
  if (communicator_ == nullptr || leaving_) return;
  leaving_ = true;
  communicator_->close(clock());
  fabric_.network().touch(fabric_.host(host_));
}

void Member::abort() {
  if (communicator_ == nullptr || leaving_) return;
  communicator_->abort("the application gave up", clock());
  fabric_.network().touch(fabric_.host(host_));
}

bool Member::die() {
  if (communicator_ == nullptr || leaving_ || fabric_.host(host_).leads(*communicator_)) return false;
  crashed();
  fabric_.network().touch(fabric_.host(host_));
  return true;
}

void Member::crashed() {
  joining_ = false;
  if (communicator_ == nullptr) return;
  for (Running& r : running_) {
    give_back(r);
    abandoned_.push_back(std::move(r.operation));
  }
  running_.clear();
  end(MR_IN_PROGRESS, "");
}

void Member::end(int status, const std::string& text) {
  judges_.trace.number(static_cast<uint64_t>(now_ns()));
  judges_.trace.number(plan_.number << 16 | rank_);
  judges_.trace.number(static_cast<uint64_t>(status));
  judges_.outcome.over(now_ns(), plan_.number, rank_, instance_, status, text);
  if (plan_.refused) {
    // A switch that is away cannot refuse.
    group_.not_refused |=
        status != MR_ERR_REFUSED && status != MR_ERR_UNREACHABLE && status != MR_IN_PROGRESS;
  } else if (status != MR_OK) {
    // The others lose a member by this, and the group forms again, for a while.
    judges_.outcome.excuse_further(plan_.number, rank_);
    if (generation_ == group_.generation && group_.generation < group_.generations_max) {
      group_.generation++;
      group_.formed_again++;
    }
  }
  if (!fabric_.host(host_).crashed()) fabric_.host(host_).forget(*communicator_);
  communicator_ = nullptr;
}

}  // namespace millrace::sim
