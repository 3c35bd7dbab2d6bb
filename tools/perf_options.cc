#include "tools/perf_options.h"

#include <openssl/sha.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "aggregation/datatype.h"
#include "tools/perf_values.h"

namespace millrace::perf {
namespace {

constexpr const char* kTypeNames = "u8 i8 i32 u32 i64 u64 f16 bf16 f32 f64 f8e4m3 f8e5m2";
constexpr const char* kOpNames = "sum prod min max avg band bor bxor land lor";
constexpr const char* kCollectiveNames = "all-reduce reduce broadcast reduce-scatter all-gather barrier";

[[noreturn]] void refuse(const char* option, const std::string& sentence) {
  throw CLI::ValidationError(option, sentence);
}

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

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

// What an option names. From "all", combinations that make no sense are left out; what was named is meant.
template <typename T>
struct Chosen {
  bool given = false, all = false;
  std::vector<T> which;
};

// One, several with commas between, or "all".
template <typename T, size_t n, typename Parse>
Chosen<T> choose(const char* option, const CLI::App& app, const std::string& text,
                 const std::array<T, n>& every, Parse parse, const char* what, const char* names) {
  Chosen<T> chosen{app.count(option) > 0, text == "all", {}};
  if (chosen.all) {
    chosen.which.assign(every.begin(), every.end());
    return chosen;
  }
  for (const std::string& part : split(text)) {
    const std::optional<T> one = parse(part);
    if (!one) refuse(option, "\"" + part + "\" is no " + what + ": " + names + ", or all");
    if (std::find(chosen.which.begin(), chosen.which.end(), *one) == chosen.which.end())
      chosen.which.push_back(*one);
  }
  return chosen;
}

std::optional<mr_type> parse_type(const std::string& text) {
  const auto type = aggregation::parse_data_type(text);
  for (mr_type t : kTypes)
    if (type && static_cast<int>(t) == static_cast<int>(*type)) return t;
  return std::nullopt;
}

std::optional<mr_op> parse_op(const std::string& text) {
  for (mr_op op : kOps)
    if (text == name(op)) return op;
  return std::nullopt;
}

// Also with underscores, as nccl-tests' programs are called.
std::optional<Collective> parse_collective(std::string text) {
  std::replace(text.begin(), text.end(), '_', '-');
  for (Collective c : kCollectives)
    if (text == name(c)) return c;
  return std::nullopt;
}

// "0", "65472", "1M", "3e" (elements), "65472-1e", "64K+2e".
Size parse_one_size(const std::string& text) {
  Size size;
  std::string bytes = text, elements;
  if (text.ends_with('e')) {
    const size_t sign = text.find_first_of("+-");
    bytes = sign == text.npos ? "0" : text.substr(0, sign);
    elements = text.substr(sign == text.npos ? 0 : text[sign] == '+' ? sign + 1 : sign);
    elements.pop_back();
  }
  const auto whole = parse_size(bytes);
  auto [end, error] = std::from_chars(elements.data(), elements.data() + elements.size(), size.elements);
  if (!whole || (text.ends_with('e') && (error != std::errc{} || end != elements.data() + elements.size())) ||
      std::abs(size.elements) > int64_t{1} << 40)
    refuse("--sizes", "\"" + text + "\" is no size: bytes (1000, 64K, 1M), elements (3e) or both (64K-1e)");
  size.bytes = *whole;
  return size;
}

std::vector<int> parse_roots(const std::string& text, int size) {
  std::vector<int> roots;
  if (text == "all") {
    for (int r = 0; r < size; r++) roots.push_back(r);
    return roots;
  }
  int root = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), root);
  if (error != std::errc{} || end != text.data() + text.size() || root < 0 || root >= size)
    refuse("--root", "\"" + text + "\" is no rank: 0 to " + std::to_string(size - 1) + ", or all");
  return {root};
}

struct Choice {
  Chosen<Collective> collectives;
  Chosen<mr_type> types;
  Chosen<mr_op> ops;
  std::vector<int> roots;
  bool root_given, bfp8;

  bool some_collective(bool (*is)(Collective)) const {
    return std::any_of(collectives.which.begin(), collectives.which.end(), is);
  }
};

// An option that says something of what is not measured is a mistake.
void check_meant(const Choice& c) {
  const std::string first = name(c.collectives.which.front());
  const bool some_reduces = c.some_collective(reduces);
  if (c.ops.given && !c.ops.all && !some_reduces) refuse("--op", first + " reduces nothing");
  if (c.bfp8 && !some_reduces)
    refuse("--wire", "bfp8 is for reductions, and " + first + " is none: it is always exact");
  if (c.root_given && !c.some_collective(has_root)) refuse("--root", first + " has no root");
  if (c.types.given && !c.types.all &&
      !c.some_collective([](Collective k) { return k != Collective::kBarrier; }))
    refuse("--type", "a barrier has no data");
  for (Collective k : c.collectives.which)
    if (c.bfp8 && !c.collectives.all && !reduces(k))
      refuse("--wire",
             std::string("bfp8 is for reductions, and ") + name(k) + " is none: it is always exact");
  for (mr_type type : c.types.which) {
    if (c.types.all || !some_reduces) continue;
    if (c.bfp8 && !goes_as_bfp8(type))
      refuse("--wire", std::string("bfp8 is for f16, bf16 and f32, not for ") + name(type));
    for (mr_op op : c.ops.which)
      if (!c.ops.all && !goes_with(type, op))
        refuse("--op", std::string(name(op)) + " does not go with " + name(type) +
                           ": bitwise and logical operators are for integers");
  }
}

std::vector<Kind> kinds_of(const Choice& c) {
  check_meant(c);
  std::vector<Kind> kinds;
  for (Collective k : c.collectives.which) {
    if (k == Collective::kBarrier) {
      kinds.push_back({k, MR_U8, kNoOp, -1});
      continue;
    }
    for (mr_type type : c.types.which)
      for (mr_op op : reduces(k) ? c.ops.which : std::vector{kNoOp}) {
        if (reduces(k) && (!goes_with(type, op) || (c.bfp8 && !goes_as_bfp8(type)))) continue;
        for (int root : has_root(k) ? c.roots : std::vector{-1}) kinds.push_back({k, type, op, root});
      }
  }
  if (kinds.empty()) refuse("--op", "there is no such operator for these types");
  return kinds;
}

void check_together(const Options& o) {
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

std::vector<uint64_t> Options::sizes(mr_type type) const {
  std::vector<uint64_t> sizes;
  for (const Size& one : size_list) {
    const int64_t more = one.elements * static_cast<int64_t>(element_bytes(type));
    sizes.push_back(
        more < 0 && one.bytes < static_cast<uint64_t>(-more) ? 0 : one.bytes + static_cast<uint64_t>(more));
  }
  if (!sizes.empty()) return sizes;
  for (uint64_t b = bytes_min; b <= bytes_max;) {
    sizes.push_back(b);
    uint64_t next = step_bytes ? b + step_bytes : std::max<uint64_t>(b, 1) * step_factor;
    if (next <= b) break;
    b = next;
  }
  return sizes;
}

Options parse_options(int argc, const char* const* argv) {
  Options o;
  CLI::App app{
      "Measures collectives reduced in the network and checks every result. Start it once per rank."};
  app.set_version_flag("--version", std::string("millrace-perf ") + mr_version());
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // as getopt has it
  app.failure_message([](const CLI::App*, const CLI::Error& e) {
    return std::string("millrace-perf: ") + e.what() + " (see millrace-perf --help)\n";
  });
  std::string min = "8", max = "64M", step, sizes, type = "f32", op = "sum", collective = "all-reduce",
              root = "0", wire = "exact", secret_file;

  auto several = [](const char* names) { return std::string(names) + ": one, several with commas, or all"; };
  app.add_option("-p,--collective", collective, several(kCollectiveNames) + " (all-reduce)");
  app.add_option(
      "-b,--minbytes", min,
      "smallest size, bytes or with K, M, G (8); sizes are of the whole vector, also where each rank "
      "has its part of it, and are rounded down to whole elements, as many in each part");
  app.add_option("-e,--maxbytes", max, "largest size (64M)");
  app.add_option("-f,--stepfactor", o.step_factor, "from one size to the next, times this (2)")
      ->check(CLI::Range(1, 1 << 30));
  app.add_option("-i,--stepbytes", step, "or plus this many bytes");
  app.add_option("--sizes", sizes, "or these, with commas: bytes (0,1000,1M), elements (3e) or both (64K-1e)")
      ->excludes("-b")
      ->excludes("-e")
      ->excludes("-f")
      ->excludes("-i");
  app.add_option("-d,--type,--datatype", type, several(kTypeNames) + " (f32)");
  app.add_option("-o,--op", op, several(kOpNames) + " that go with the type (sum)");
  app.add_option("-r,--root", root, "root of reduce and broadcast, or all: one after the other (0)");
  app.add_flag(
      "--deterministic", o.deterministic,
      "floating-point results that do not depend on the order of arrival; what is reduced then has sums "
      "that would show it");
  app.add_option("--wire", wire,
                 "exact, or bfp8: block floating point, checked within its error bound (exact)")
      ->check(CLI::IsMember({"exact", "bfp8"}));
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
  app.add_option(
         "--combine", o.combine,
         "on: with the other ranks of this host, through shared memory, before the network; off; auto: "
         "on where a launcher says that there are several (auto)")
      ->envname("MILLRACE_COMBINE")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  app.add_flag("--wait", o.wait, "wait where the switch has no memory left, instead of being refused");
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
    if (app.count("--sizes"))
      for (const std::string& one : split(sizes)) o.size_list.push_back(parse_one_size(one));
    o.bfp8 = wire == "bfp8";
    o.key = parse_key(o.group);
    if (!secret_file.empty()) o.secret = read_secret(secret_file);
    check_together(o);
    o.kinds = kinds_of(
        {choose("-p", app, collective, kCollectives, parse_collective, "collective", kCollectiveNames),
         choose("-d", app, type, kTypes, parse_type, "type", kTypeNames),
         choose("-o", app, op, kOps, parse_op, "operator", kOpNames), parse_roots(root, o.size),
         app.count("-r") > 0 && root != "all", o.bfp8});
  } catch (const CLI::ParseError& e) {
    throw Exit{app.exit(e) == 0 ? 0 : 2};
  }
  return o;
}

}  // namespace millrace::perf
