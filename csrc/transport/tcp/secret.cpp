#include "transport/tcp/secret.h"

#include <cerrno>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "transport/matching/codec.h"
#include "transport/tcp/sha256.h"

namespace syncengine::tcp {

namespace {

std::string trimmed(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

}  // namespace

std::string load_secret(const std::string& secret, const std::string& file) {
  if (!secret.empty() && !file.empty())
    throw Error(ErrorKind::InvalidUsage, "SYNCENGINE_SECRET and SYNCENGINE_SECRET_FILE are both set: set one");
  if (secret.empty() && file.empty()) return "";
  std::string value = secret;
  if (!file.empty()) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) throw_system_error("can't read SYNCENGINE_SECRET_FILE (" + file + ")", errno);
    value = trimmed({std::istreambuf_iterator<char>(stream), {}});
  }
  if (value.size() < kShortestSecret) {
    throw Error(ErrorKind::InvalidUsage,
                std::string(file.empty() ? "SYNCENGINE_SECRET" : "the secret in SYNCENGINE_SECRET_FILE") + " has " +
                    std::to_string(value.size()) + " bytes: give at least " + std::to_string(kShortestSecret) +
                    " (try: head -c 32 /dev/urandom | base64)");
  }
  return value;
}

PairKeys pair_keys(int rank, const Address& address, int other_rank, const Address& other, const std::string& secret) {
  if (other_rank < rank) return pair_keys(other_rank, other, rank, address, secret);
  std::string both = Writer().u32(rank).u32(other_rank).bytes(encode(address)).bytes(encode(other)).text();
  return {.ticket = hmac_sha256(both, "syncengine ticket"),
          .proof = hmac_sha256(secret, Writer().bytes("syncengine proof").bytes(both).text())};
}

}  // namespace syncengine::tcp
