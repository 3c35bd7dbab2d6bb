#include "switch/yaml_reader.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "switch/config.h"

namespace millrace::switching {

namespace {

std::optional<uint64_t> parse_number(std::string_view text) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  }
  uint64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v, base);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return v;
}

std::string join(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& w : words) all += (all.empty() ? "" : ", ") + w;
  return all;
}

}  // namespace

std::optional<uint64_t> parse_size(std::string_view text) {
  static constexpr std::pair<std::string_view, unsigned> kUnits[] = {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}};
  for (const auto& [unit, shift] : kUnits) {
    if (!text.ends_with(unit)) continue;
    text.remove_suffix(unit.size());
    while (text.ends_with(' ')) text.remove_suffix(1);
    const auto v = parse_number(text);
    if (!v || *v > UINT64_MAX >> shift) return std::nullopt;
    return *v << shift;
  }
  return parse_number(text);
}

YamlMap::YamlMap(std::string file, std::string path, const YAML::Node& node)
    : file_(std::move(file)),
      path_(std::move(path)),
      node_(node.IsDefined() && !node.IsNull() ? node : YAML::Node()) {
  if (node_.IsNull()) return;
  if (!node_.IsMap())
    fail_at(node_, (path_.empty() ? std::string("the file") : path_) + ": must be a map of keys and values");
  std::set<std::string> seen;
  for (const auto& entry : node_) {
    if (!entry.first.IsScalar()) fail_at(entry.first, path_of("?") + ": a key must be a plain word");
    if (!seen.insert(entry.first.Scalar()).second)
      fail_at(entry.first, path_of(entry.first.Scalar()) + ": given twice");
  }
}

void YamlMap::fail_at(const YAML::Node& node, const std::string& what) const {
  const int line = node.IsDefined() ? node.Mark().line + 1 : 0;
  throw Error(ErrorCode::kConfig, file_ + (line > 0 ? ":" + std::to_string(line) : "") + ": " + what);
}

void YamlMap::fail(const std::string& key, const std::string& what) const {
  const YAML::Node& map = node_;
  const YAML::Node value = map.IsMap() ? map[key] : YAML::Node(YAML::NodeType::Undefined);
  fail_at(value.IsDefined() ? value : node_, path_of(key) + ": " + what);
}

YAML::Node YamlMap::get(const std::string& key) {
  if (std::find(asked_.begin(), asked_.end(), key) == asked_.end()) asked_.push_back(key);
  const YAML::Node& map = node_;  // operator[] of a constant node adds nothing
  return map.IsMap() ? map[key] : YAML::Node(YAML::NodeType::Undefined);
}

YAML::Node YamlMap::require(const std::string& key) {
  YAML::Node node = get(key);
  if (!node.IsDefined() || node.IsNull()) fail_at(node_, path_of(key) + ": missing");
  return node;
}

void YamlMap::list(const std::string& key, const std::function<void(YamlMap)>& each) {
  const YAML::Node node = get(key);
  if (!node.IsDefined() || node.IsNull()) return;
  if (!node.IsSequence()) fail(key, "must be a list");
  for (size_t i = 0; i < node.size(); i++)
    each(YamlMap(file_, path_of(key) + "[" + std::to_string(i) + "]", node[i]));
}

const std::string& YamlMap::scalar(const std::string& key, const YAML::Node& node, const char* kind) const {
  if (!node.IsScalar()) fail(key, std::string("must be ") + kind);
  return node.Scalar();
}

void YamlMap::text(const std::string& key, std::string& value) {
  const YAML::Node node = get(key);
  if (!node.IsDefined()) return;
  value = scalar(key, node, "a text");
  if (value.empty()) fail(key, "must not be empty");
}

void YamlMap::texts(const std::string& key, std::vector<std::string>& value) {
  const YAML::Node node = get(key);
  if (!node.IsDefined() || node.IsNull()) return;
  if (!node.IsSequence()) fail(key, "must be a list, as in [a, b]");
  value.clear();
  for (const auto& element : node) {
    if (!element.IsScalar()) fail_at(element, path_of(key) + ": each element must be a text");
    value.push_back(element.Scalar());
  }
}

void YamlMap::number(const std::string& key, uint64_t min, uint64_t max,
                     const std::function<void(uint64_t)>& set) {
  const YAML::Node node = get(key);
  if (!node.IsDefined()) return;
  const std::string& s = scalar(key, node, "a number");
  const auto v = parse_number(s);
  if (!v || *v < min || *v > max)
    fail(key, "'" + s + "' is not a whole number in " + std::to_string(min) + " … " + std::to_string(max));
  set(*v);
}

void YamlMap::size(const std::string& key, uint64_t min, uint64_t max, uint64_t& value) {
  const YAML::Node node = get(key);
  if (!node.IsDefined()) return;
  const std::string& s = scalar(key, node, "a size");
  const auto v = parse_size(s);
  if (!v || *v < min || *v > max)
    fail(key, "'" + s + "' is not a size in " + std::to_string(min) + " … " + std::to_string(max) +
                  " bytes (write bytes, KiB, MiB or GiB)");
  value = *v;
}

void YamlMap::probability(const std::string& key, double& value) {
  const YAML::Node node = get(key);
  if (!node.IsDefined()) return;
  const std::string& s = scalar(key, node, "a number");
  double v = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), v);
  // The comparison is written so that "nan" fails it too.
  if (error != std::errc{} || end != s.data() + s.size() || !(v >= 0 && v <= 1))
    fail(key, "'" + s + "' is not a probability in 0 … 1");
  value = v;
}

void YamlMap::choice(const std::string& key, const std::vector<std::string>& allowed, std::string& value) {
  const YAML::Node node = get(key);
  if (!node.IsDefined()) return;
  const std::string& s = scalar(key, node, "a word");
  if (std::find(allowed.begin(), allowed.end(), s) == allowed.end())
    fail(key, "'" + s + "' is not one of " + join(allowed));
  value = s;
}

void YamlMap::finish() const {
  if (!node_.IsMap()) return;
  for (const auto& entry : node_) {
    const std::string& key = entry.first.Scalar();
    if (std::find(asked_.begin(), asked_.end(), key) == asked_.end())
      fail_at(entry.first, path_of(key) + ": unknown key (known here: " + join(asked_) + ")");
  }
}

}  // namespace millrace::switching
