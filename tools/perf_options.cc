#include "tools/perf_options.h"

#include <openssl/sha.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "aggregation/datatype.h"
#include "tools/perf_values.h"

namespace millrace::perf {
namespace {

constexpr std::array kTypes = {MR_U8, MR_I8, MR_I32, MR_U32, MR_I64, MR_U64, MR_F16, MR_BF16, MR_F32, MR_F64};
constexpr std::array kOps = {MR_SUM,  MR_PROD, MR_MIN,  MR_MAX,  MR_AVG,
                             MR_BAND, MR_BOR,  MR_BXOR, MR_LAND, MR_LOR};
// As nccl-tests' programs are called.
constexpr std::array<const char*, 6> kCollectives = {"all_reduce",     "reduce",     "broadcast",
                                                     "reduce_scatter", "all_gather", "barrier"};

// "8", "64K", "64M", "1G": binary multiples.
std::optional<uint64_t> parse_size(const std::string& text) {
  uint64_t number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  std::string suffix(end, text.data() + text.size());
  int shift;
  if (suffix.empty() || suffix == "B") {
    shift = 0;
  } else if (suffix == "K" || suffix == "k" || suffix == "KiB") {
    shift = 10;
  } else if (suffix == "M" || suffix == "m" || suffix == "MiB") {
    shift = 20;
  } else if (suffix == "G" || suffix == "g" || suffix == "GiB") {
    shift = 30;
  } else {
    return std::nullopt;
  }
  if (number > std::numeric_limits<uint64_t>::max() >> (shift + 8)) return std::nullopt;
  return number << shift;
}

uint64_t require_size(const char* option, const std::string& text) {
  if (auto size = parse_size(text)) return *size;
  throw CLI::ValidationError(option, "\"" + text + "\" is no size: bytes, or a number and K, M or G");
}

// 32 hex digits stand for themselves; any other string for the first half of its SHA-256.
std::array<uint8_t, 16> parse_key(const std::string& text) {
  std::array<uint8_t, 16> key;
  if (text.size() == 32 && text.find_first_not_of("0123456789abcdefABCDEF") == text.npos) {
    for (size_t i = 0; i < key.size(); i++)
      key[i] = static_cast<uint8_t>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
    return key;
  }
  uint8_t digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest);
  std::copy_n(digest, key.size(), key.begin());
  return key;
}

std::string read_secret(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw CLI::ValidationError("--secret-file", "cannot read " + file);
  std::string secret{std::istreambuf_iterator<char>(in), {}};
  while (!secret.empty() && (secret.back() == '\n' || secret.back() == '\r')) secret.pop_back();
  if (secret.empty()) throw CLI::ValidationError("--secret-file", file + " is empty");
  return secret;
}

std::vector<mr_type> parse_types(const std::string& text) {
  if (text == "all") return {kTypes.begin(), kTypes.end()};
  if (auto type = aggregation::parse_data_type(text))
    for (mr_type t : kTypes)
      if (static_cast<int>(t) == static_cast<int>(*type)) return {t};
  throw CLI::ValidationError("-d",
                             "\"" + text + "\" is no type: u8 i8 i32 u32 i64 u64 f16 bf16 f32 f64, or all");
}

// "all", or some of them with commas between.
std::vector<mr_op> parse_ops(const std::string& text) {
  if (text == "all") return {kOps.begin(), kOps.end()};
  std::vector<mr_op> ops;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string one = text.substr(at, comma - at);
    const auto found = std::find_if(kOps.begin(), kOps.end(), [&](mr_op op) { return one == name(op); });
    if (found == kOps.end())
      throw CLI::ValidationError(
          "-o", "\"" + one + "\" is no operator: sum prod min max avg band bor bxor land lor, or all");
    ops.push_back(*found);
    at = comma + 1;
  }
  return ops;
}

// "all", or some of them with commas between.
std::vector<Collective> parse_collectives(const std::string& text) {
  std::vector<Collective> collectives;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string one = text.substr(at, comma - at);
    const auto found = std::find(kCollectives.begin(), kCollectives.end(), one);
    if (one == "all")
      for (size_t i = 0; i < kCollectives.size(); i++) collectives.push_back(static_cast<Collective>(i));
    else if (found != kCollectives.end())
      collectives.push_back(static_cast<Collective>(found - kCollectives.begin()));
    else
      throw CLI::ValidationError("-p", "\"" + one +
                                           "\" is no collective: all_reduce reduce broadcast "
                                           "reduce_scatter all_gather barrier, or all");
    at = comma + 1;
  }
  return collectives;
}

int parse_root(const std::string& text, int size) {
  if (text == "all") return -1;
  int root = -1;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), root);
  if (error != std::errc{} || end != text.data() + text.size() || root < 0 || root >= size)
    throw CLI::ValidationError("-r",
                               "\"" + text + "\" is no rank: 0 to " + std::to_string(size - 1) + ", or all");
  return root;
}

void check_together(const Options& o) {
  if (o.types.size() == 1 && o.ops.size() == 1 && !has_values(o.types[0], o.ops[0]))
    throw CLI::ValidationError("-o", std::string(name(o.ops[0])) + " does not go with " + name(o.types[0]) +
                                         ": bitwise and logical operators are for integers");
  if (o.rank >= o.size)
    throw CLI::ValidationError("--rank", std::to_string(o.rank) + " of " + std::to_string(o.size) +
                                             " ranks: ranks go from 0 to size - 1");
  if (o.size > 1 && o.switch_address.empty())
    throw CLI::ValidationError("--switch", "more than one rank needs the switch's address");
  if (o.size > 1 && o.group.empty())
    throw CLI::ValidationError("--group", "more than one rank needs a group key, the same at all of them");
  if (o.bytes_max < o.bytes_min) throw CLI::ValidationError("-e", "is less than -b");
  if (o.step_bytes == 0 && o.step_factor < 2 && o.bytes_max != o.bytes_min)
    throw CLI::ValidationError("-f", "must be at least 2");
  if (o.check && o.size > kExactWorldMax)
    throw CLI::ValidationError("-c", "results of more than " + std::to_string(kExactWorldMax) +
                                         " ranks are not exact in all types: give -c 0");
}

}  // namespace

const char* name(mr_type type) { return aggregation::name(static_cast<aggregation::DataType>(type)).data(); }
const char* name(mr_op op) {
  if (op == MR_LAND) return "land";
  if (op == MR_LOR) return "lor";
  return aggregation::name(static_cast<aggregation::ReduceOp>(op)).data();
}
const char* name(Collective collective) { return kCollectives[static_cast<size_t>(collective)]; }
bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}
bool has_root(Collective c) { return c == Collective::kReduce || c == Collective::kBroadcast; }
bool has_shards(Collective c) { return c == Collective::kReduceScatter || c == Collective::kAllGather; }

std::vector<uint64_t> Options::sizes() const {
  std::vector<uint64_t> sizes;
  for (uint64_t b = bytes_min; b <= bytes_max;) {
    sizes.push_back(b);
    uint64_t next = step_bytes ? b + step_bytes : std::max<uint64_t>(b, 1) * step_factor;
    if (next <= b) break;
    b = next;
  }
  return sizes;
}

Options parse_options(int argc, char** argv) {
  Options o;
  CLI::App app{
      "Measures collectives reduced in the network and checks every result. Start it once per rank."};
  app.set_version_flag("--version", std::string("millrace-perf ") + mr_version());
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // as getopt has it
  app.failure_message([](const CLI::App*, const CLI::Error& e) {
    return std::string("millrace-perf: ") + e.what() + " (see millrace-perf --help)\n";
  });
  std::string min = "8", max = "64M", step, type = "f32", op = "sum", collective = "all_reduce", root = "0",
              secret_file;

  app.add_option("-b,--minbytes", min, "smallest size, bytes or with K, M, G (8)");
  app.add_option("-e,--maxbytes", max, "largest size (64M)");
  app.add_option("-f,--stepfactor", o.step_factor, "from one size to the next, times this (2)")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("-i,--stepbytes", step, "or plus this many bytes");
  app.add_option("-d,--datatype", type, "u8 i8 i32 u32 i64 u64 f16 bf16 f32 f64, or all (f32)");
  app.add_option("-o,--op", op,
                 "sum prod min max avg band bor bxor land lor: one, several with commas, or all "
                 "that go with the type (sum)");
  app.add_option(
      "-p,--collective", collective,
      "all_reduce reduce broadcast reduce_scatter all_gather barrier: one, several with commas, or "
      "all (all_reduce)");
  app.add_option("-r,--root", root, "root of reduce and broadcast, or all in turn (0)");
  app.add_flag("--deterministic", o.deterministic, "sums in one order of ranks, whoever comes first");
  app.add_option("-n,--iters", o.iterations, "timed iterations (20)")->check(CLI::Range(1, 1 << 30));
  app.add_option("-w,--warmup", o.warmups, "iterations before those (5)")->check(CLI::Range(0, 1 << 30));
  app.add_option("-c,--check", o.check, "1: check every element, 0: do not (1)");
  app.add_option("--inflight", o.inflight, "operations outstanding at once (1)")->check(CLI::Range(1, 4096));

  app.add_option("--rank", o.rank, "this rank")->envname("MILLRACE_RANK")->check(CLI::Range(0, 65534));
  app.add_option("--size", o.size, "number of ranks")->envname("MILLRACE_SIZE")->check(CLI::Range(1, 65535));
  app.add_option("--group", o.group, "group key: 32 hex digits, or any other string")
      ->envname("MILLRACE_GROUP");
  app.add_option("--switch", o.switch_address, "ADDRESS, ADDRESS:PORT or [ADDRESS]:PORT")
      ->envname("MILLRACE_SWITCH");
  app.add_option(
         "--transport", o.transport,
         "verbs: the RDMA NIC's queue pairs; soft: a user-space endpoint on a packet socket; auto: verbs "
         "where there is a usable device (auto)")
      ->envname("MILLRACE_TRANSPORT")
      ->check(CLI::IsMember({"auto", "verbs", "soft"}));
  app.add_option("--register", o.registered,
                 "1: register the buffers beforehand, 0: let the library register what it meets (1)");
  app.add_option("--device", o.device,
                 "network interface, or RDMA device (the interface that routes to the switch)")
      ->envname("MILLRACE_DEVICE");
  app.add_option("--stripes", o.stripes, "queue pairs to the switch (1)")->check(CLI::Range(1, 16));
  app.add_option("--tenant", o.tenant, "tenant number (0)");
  app.add_option("--secret-file", secret_file, "file with the tenant's secret");

  app.add_option("--json", o.json,
                 "also write the results to this file; - for standard output instead of the table");
  app.add_flag("--stats", o.stats, "print transport counters, summed over ranks, at the end");

  try {
    app.parse(argc, argv);
    o.bytes_min = require_size("-b", min);
    o.bytes_max = require_size("-e", max);
    if (!step.empty()) o.step_bytes = require_size("-i", step);
    o.types = parse_types(type);
    o.ops = parse_ops(op);
    o.collectives = parse_collectives(collective);
    o.root = parse_root(root, o.size);
    o.key = parse_key(o.group);
    if (!secret_file.empty()) o.secret = read_secret(secret_file);
    check_together(o);
  } catch (const CLI::ParseError& e) {
    throw Exit{app.exit(e) == 0 ? 0 : 2};
  }
  return o;
}

}  // namespace millrace::perf
