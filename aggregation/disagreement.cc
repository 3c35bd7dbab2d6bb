#include "aggregation/disagreement.h"

#include <algorithm>

namespace millrace::aggregation {
namespace {

struct Field {
  const char* name;
  std::string (*text)(const SegmentHeader&);
};
constexpr Field kFields[] = {
    {"collective",
     [](const SegmentHeader& h) { return std::string(name(static_cast<Collective>(h.collective))); }},
    {"operator", [](const SegmentHeader& h) { return std::string(name(static_cast<ReduceOp>(h.op))); }},
    {"datatype", [](const SegmentHeader& h) { return std::string(name(static_cast<DataType>(h.type))); }},
    {"wire type",
     [](const SegmentHeader& h) { return std::string(name(static_cast<DataType>(h.wire_type))); }},
    {"order of ranks",
     [](const SegmentHeader& h) { return std::string(h.flags & kFlagDeterministic ? "fixed" : "any"); }},
    {"root", [](const SegmentHeader& h) { return std::to_string(h.root.value()); }},
    {"operation", [](const SegmentHeader& h) { return std::to_string(h.operation.value()); }},
    {"total", [](const SegmentHeader& h) { return std::to_string(h.total.value()) + " B"; }},
    {"offset", [](const SegmentHeader& h) { return std::to_string(h.offset.value()); }},
    {"length", [](const SegmentHeader& h) { return std::to_string(h.length.value()); }},
};

std::string list(const std::vector<uint16_t>& ranks) {
  std::string s = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min<size_t>(16, ranks.size()); i++)
    s += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > 16 ? s + ", …" : s;
}

}  // namespace

bool agree(const SegmentHeader& a, const SegmentHeader& b) noexcept {
  constexpr uint8_t shared_flags = static_cast<uint8_t>(~kFlagsOfMember);
  return a.collective == b.collective && a.op == b.op && a.type == b.type && a.wire_type == b.wire_type &&
         ((a.flags ^ b.flags) & shared_flags) == 0 && a.root == b.root && a.operation == b.operation &&
         a.total == b.total && a.offset == b.offset && a.length == b.length;
}

Disagreement judge(const std::vector<std::pair<uint16_t, SegmentHeader>>& headers) {
  struct Camp {
    const SegmentHeader* header;
    std::vector<uint16_t> ranks;
  };
  std::vector<Camp> camps;  // of equal headers, in the order of their first rank
  for (const auto& member : headers) {
    const SegmentHeader& header = member.second;
    auto camp =
        std::find_if(camps.begin(), camps.end(), [&](const Camp& c) { return agree(*c.header, header); });
    if (camp == camps.end()) camp = camps.insert(camps.end(), Camp{&header, {}});
    camp->ranks.push_back(member.first);
  }
  size_t largest = 0, of_that_size = 0;
  for (const Camp& c : camps) largest = std::max(largest, c.ranks.size());
  for (const Camp& c : camps) of_that_size += c.ranks.size() == largest;
  const bool majority = of_that_size == 1;
  const Camp& reference =
      *std::find_if(camps.begin(), camps.end(), [&](const Camp& c) { return c.ranks.size() == largest; });

  Disagreement d;
  d.text = "the ranks disagree about operation " + std::to_string(reference.header->operation.value()) + ":";
  const char* separator = " ";
  for (const Camp& c : camps) {
    if (&c != &reference || !majority) d.ranks.insert(d.ranks.end(), c.ranks.begin(), c.ranks.end());
    if (&c == &reference) continue;
    for (const Field& f : kFields) {
      const std::string here = f.text(*c.header), there = f.text(*reference.header);
      if (here == there) continue;
      d.text += separator + list(c.ranks) + " " + f.name + " " + here + ", " +
                (majority ? "the others " : list(reference.ranks) + " ") + there;
      separator = "; ";
    }
  }
  std::sort(d.ranks.begin(), d.ranks.end());
  return d;
}

}  // namespace millrace::aggregation
