#include "tools/perf_cases.h"

#include "aggregation/datatype.h"

namespace millrace::perf {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "all-reduce";
    case Collective::kReduce:
      return "reduce";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduceScatter:
      return "reduce-scatter";
    case Collective::kAllGather:
      return "all-gather";
    case Collective::kBarrier:
      return "barrier";
  }
  return "unknown";
}

const char* name(mr_type type) { return aggregation::name(static_cast<aggregation::DataType>(type)).data(); }

const char* name(mr_op op) {
  if (op == kNoOp) return "none";
  if (op == MR_LAND) return "land";
  if (op == MR_LOR) return "lor";
  return aggregation::name(static_cast<aggregation::ReduceOp>(op)).data();
}

bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}
bool has_root(Collective c) { return c == Collective::kReduce || c == Collective::kBroadcast; }
bool has_shards(Collective c) { return c == Collective::kReduceScatter || c == Collective::kAllGather; }

bool is_floating(mr_type type) { return type >= MR_F16; }
bool goes_with(mr_type type, mr_op op) {
  const bool arithmetic = op == MR_SUM || op == MR_PROD || op == MR_MIN || op == MR_MAX || op == MR_AVG;
  return arithmetic || !is_floating(type);
}
bool goes_as_bfp8(mr_type type) { return type == MR_F16 || type == MR_BF16 || type == MR_F32; }

Extent extent_of(uint64_t bytes, Collective collective, mr_type type, int ranks) {
  const size_t element = aggregation::element_bytes(static_cast<aggregation::DataType>(type));
  const size_t parts = has_shards(collective) ? static_cast<size_t>(ranks) : 1;
  const size_t count = bytes / (element * parts);
  return {count * element * parts, count};
}

double bus_factor(Collective collective, int ranks) {
  const double n = ranks;
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * (n - 1) / n;
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      return (n - 1) / n;
    default:
      return 1;
  }
}

}  // namespace millrace::perf
