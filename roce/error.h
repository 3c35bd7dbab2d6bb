// The exception for a bad world: start-up, control and configuration. Never thrown for a packet.
#pragma once

#include <stdexcept>
#include <string>

namespace millrace {

enum class ErrorCode { kUsage, kConfig, kSystem, kNoDevice, kUnreachable, kRefused, kState };

// what() is one sentence that names the thing at fault and says what to do about it.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace millrace
