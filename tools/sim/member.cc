#include "tools/sim/member.h"

#include <algorithm>

namespace millrace::sim {

using host::Communicator;

const std::vector<uint8_t>& GroupRun::expected_of(size_t operation) {
  expected.resize(plan->operations.size());
  const OperationPlan& o = plan->operations[operation];
  if (expected[operation].empty() && o.bytes() != 0)
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
  c.switch_address = fabric_.address(plan_.where, plan_.v6);
  c.tenant = plan_.tenant;
  c.secret = plan_.secret;
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

void Member::submit() {
  const OperationPlan& o = plan_.operations[next_];
  const uint32_t size = check::element_bytes(o.reduction.type);
  const uint64_t bytes = o.bytes();
  auto buffer = [&](const char* what) {
    const uint64_t guard = check::MemoryCheck::kGuard;
    uint8_t* at = arena_.take(bytes + 2 * guard, size * random_.below(8)) + guard;
    return judges_.memory.add(at, bytes,
                              "group " + std::to_string(plan_.number) + " rank " + std::to_string(rank_) +
                                  " instance " + std::to_string(instance_) + " operation " +
                                  std::to_string(next_) + " " + what + " buffer");
  };
  Running r;
  r.number = next_;
  r.send = buffer("send");
  r.recv = o.in_place ? r.send : buffer("receive");
  auto op = std::make_unique<host::Operation>();
  op->collective = o.barrier ? aggregation::Collective::kBarrier : aggregation::Collective::kAllReduce;
  op->type = o.barrier ? aggregation::DataType::kU8 : static_cast<aggregation::DataType>(o.reduction.type);
  op->op = o.barrier ? aggregation::ReduceOp::kNone : static_cast<aggregation::ReduceOp>(o.reduction.op);
  op->send = judges_.memory.base(r.send);
  op->recv = judges_.memory.base(r.recv);
  op->bytes = bytes;
  if (!o.barrier) check::fill_contribution(o.reduction, rank_, judges_.memory.base(r.send));
  if (disagree_) {
    disagree_ = false;
    op->bytes = bytes >= 2 * size ? bytes - size : 0;
    if (bytes == 0) {
      op->collective = o.barrier ? aggregation::Collective::kAllReduce : aggregation::Collective::kBarrier;
      op->type = aggregation::DataType::kU8;
      op->op = o.barrier ? aggregation::ReduceOp::kSum : aggregation::ReduceOp::kNone;
    }
  }
  judges_.memory.offered(r.send, !o.in_place);
  if (!o.in_place) judges_.memory.offered(r.recv, false);
  judges_.outcome.submitted(plan_.number, rank_, instance_, next_);
  communicator_->submit(op.get(), clock());
  fabric_.network().touch(fabric_.host(host_));
  r.operation = std::move(op);
  running_.push_back(std::move(r));
  next_++;
  plan_next();
}

void Member::finish(Running& r) {
  const host::Operation& op = *r.operation;
  judges_.trace.number(static_cast<uint64_t>(now_ns()));
  judges_.trace.number(plan_.number << 16 | rank_);
  judges_.trace.number(uint64_t{r.number} << 8 | static_cast<uint64_t>(op.status));
  judges_.trace.bytes({reinterpret_cast<const uint8_t*>(op.text.data()), op.text.size()});
  if (op.status == MR_OK && op.bytes != 0) {
    const std::string wrong = check::explain_difference(plan_.operations[r.number].reduction,
                                                        group_.expected_of(r.number), {op.recv, op.bytes});
    if (!wrong.empty())
      judges_.violations.add("sum", now_ns(),
                             "group " + std::to_string(plan_.number) + " rank " + std::to_string(rank_) +
                                 " operation " + std::to_string(r.number) + ": " + wrong);
  }
  judges_.outcome.ended(now_ns(), plan_.number, rank_, instance_, r.number, op.status, op.text);
  judges_.memory.returned(r.send, now_ns());
  if (r.recv != r.send) judges_.memory.returned(r.recv, now_ns());
}

void Member::step(Time) {
  if (communicator_ == nullptr) return;
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

void Member::crashed() {
  joining_ = false;
  if (communicator_ == nullptr) return;
  for (Running& r : running_) {
    judges_.memory.returned(r.send, now_ns());
    if (r.recv != r.send) judges_.memory.returned(r.recv, now_ns());
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
    group_.not_refused |= status != MR_ERR_REFUSED && status != MR_IN_PROGRESS;
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
