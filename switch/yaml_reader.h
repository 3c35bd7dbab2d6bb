// Reads YAML maps strictly: every key must be known and given once, every value of its type and in its range,
// or a millrace::Error says where ("leaf1.yaml:12: aggregation.window: 0 is not in 1 … 1024"). Start-up only.
#pragma once

#include <yaml-cpp/yaml.h>

#include <functional>
#include <string>
#include <vector>

#include "roce/error.h"
#include "roce/types.h"

namespace millrace::switching {

class YamlMap {
 public:
  // `path` names the map in errors ("aggregation"; empty at the top); an absent or empty value is an empty
  // map.
  YamlMap(std::string file, std::string path, const YAML::Node& node);

  // The value, or a node that is not there. Whatever is not asked for by finish() is an unknown key.
  YAML::Node get(const std::string& key);
  YAML::Node require(const std::string& key);
  YamlMap map(const std::string& key) { return {file_, path_of(key), get(key)}; }
  // Calls `each` with the map and path of every element of a list.
  void list(const std::string& key, const std::function<void(YamlMap)>& each);

  // Each leaves `value` alone when the key is absent.
  void text(const std::string& key, std::string& value);
  void texts(const std::string& key, std::vector<std::string>& value);
  void number(const std::string& key, uint64_t min, uint64_t max, const std::function<void(uint64_t)>& set);
  template <typename T>
  void number(const std::string& key, uint64_t min, uint64_t max, T& value) {
    number(key, min, max, [&](uint64_t v) { value = static_cast<T>(v); });
  }
  void size(const std::string& key, uint64_t min, uint64_t max, uint64_t& value);
  void duration(const std::string& key, Time unit, uint64_t min, uint64_t max, Time& value) {
    number(key, min, max, [&](uint64_t v) { value = unit * static_cast<int64_t>(v); });
  }
  void probability(const std::string& key, double& value);
  void choice(const std::string& key, const std::vector<std::string>& allowed, std::string& value);

  // Throws for the first key that was not asked for.
  void finish() const;

  // For checks that only the caller can make.
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;
  [[noreturn]] void fail_at(const YAML::Node& node, const std::string& what) const;
  std::string path_of(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
  const YAML::Node& node() const { return node_; }
  const std::string& file() const { return file_; }

 private:
  const std::string& scalar(const std::string& key, const YAML::Node& node, const char* kind) const;

  std::string file_, path_;
  YAML::Node node_;
  std::vector<std::string> asked_;
};

}  // namespace millrace::switching
