// Proofs of identity: both sides of the handshake, honest and not.
#include <random>

#include "test.h"
#include "transport/tcp/rendezvous.h"
#include "transport/tcp/secret.h"

namespace syncengine::tcp {

namespace {

Address address_of(char name) { return {.port = 1, .network = std::string(32, 'n'), .key = std::string(32, name)}; }

PairKeys keys_of(const std::string& secret = "") { return pair_keys(0, address_of('a'), 1, address_of('b'), secret); }

Hello hello(char nonce = 'c') { return {.connection = 2, .client = 1, .server = 0, .nonce = std::string(32, nonce)}; }

ServerHandshake server(const PairKeys& keys = keys_of(), char nonce = 's') {
  return {std::string(32, nonce), [keys](const Hello& hello) {
            return hello.client == 1 && hello.server == 0 ? std::optional(keys) : std::nullopt;
          }};
}

// Lets them talk until one has nothing more to say.
void talk(ClientHandshake& client, ServerHandshake& server) {
  std::string words = client.first_words();
  while (!words.empty()) {
    CHECK_EQ(words.size(), server.wanted());
    words = server.receive(words);
    if (words.empty() || client.wanted() == 0) return;
    CHECK_EQ(words.size(), client.wanted());
    words = client.receive(words);
  }
}

}  // namespace

TEST(handshake_succeeds) {
  for (const char* secret : {"", "a secret of the job"}) {
    ClientHandshake one(hello(), keys_of(secret));
    ServerHandshake zero = server(keys_of(secret));
    talk(one, zero);
    CHECK(one.result() == HandshakeResult::Fine && zero.result() == HandshakeResult::Fine);
    CHECK(one.wanted() == 0 && zero.wanted() == 0);
    CHECK_EQ(zero.hello().connection, 2);
  }
}

TEST(handshake_with_another_secret_is_named_on_both_sides) {
  ClientHandshake one(hello(), keys_of("a secret of the job"));
  ServerHandshake zero = server(keys_of("another"));
  talk(one, zero);
  CHECK(one.result() == HandshakeResult::Secret && zero.result() == HandshakeResult::Secret && zero.has_ticket());
}

// It knows neither secret nor addresses: it gets no answer at all.
TEST(handshake_tells_a_stranger_nothing) {
  PairKeys wrong = pair_keys(0, address_of('x'), 1, address_of('y'), "");
  ClientHandshake one(hello(), wrong);
  ServerHandshake zero = server();
  CHECK_EQ(zero.receive(one.first_words()), "");
  CHECK(zero.result() == HandshakeResult::Stranger && !zero.has_ticket() && zero.wanted() == 0);
  Hello other = hello();
  other.client = 2;
  ClientHandshake two(other, keys_of());
  ServerHandshake again = server();
  CHECK_EQ(again.receive(two.first_words()), "");
  CHECK(again.result() == HandshakeResult::Stranger);
}

// What was said in one handshake is worth nothing in the next: the other side's nonce is new.
TEST(handshake_cannot_be_replayed) {
  ClientHandshake one(hello(), keys_of());
  ServerHandshake zero = server();
  std::string first = one.first_words();
  std::string challenge = zero.receive(first);
  std::string answer = one.receive(challenge);
  CHECK_EQ(zero.receive(answer).size(), 1u);
  CHECK(zero.result() == HandshakeResult::Fine);

  ServerHandshake later = server(keys_of(), 't');
  CHECK(!later.receive(first).empty());
  later.receive(answer);
  CHECK(later.result() == HandshakeResult::Secret);

  ClientHandshake next(hello('d'), keys_of());
  next.receive(challenge);
  CHECK(next.result() == HandshakeResult::Secret);
}

// One bit anywhere, either side: nobody accepts.
TEST(handshake_notices_every_bit) {
  auto flipped = [](std::string words, size_t bit) {
    words[bit / 8] ^= static_cast<char>(1 << bit % 8);
    return words;
  };
  std::string first = ClientHandshake(hello(), keys_of()).first_words();
  for (size_t bit = 0; bit < first.size() * 8; ++bit) {
    ServerHandshake zero = server();
    zero.receive(flipped(first, bit));
    CHECK(!zero.has_ticket());
  }
  ServerHandshake zero = server();
  std::string challenge = zero.receive(first);
  for (size_t bit = 0; bit < challenge.size() * 8; ++bit) {
    ClientHandshake one(hello(), keys_of());
    one.receive(flipped(challenge, bit));
    CHECK(one.wanted() == 0 && one.result() != HandshakeResult::Fine);
  }
  ClientHandshake one(hello(), keys_of());
  std::string answer = one.receive(challenge);
  for (size_t bit = 0; bit < answer.size() * 8; ++bit) {
    ServerHandshake again = server();
    again.receive(first);
    again.receive(flipped(answer, bit));
    CHECK(again.result() == HandshakeResult::Secret);
  }
}

// Deterministic: truncated, mutated, random and spliced messages. Nobody is let in who does not know the keys.
TEST(handshake_fuzz) {
  std::mt19937_64 random(20261120);
  const std::string first = ClientHandshake(hello(), keys_of()).first_words();
  ServerHandshake honest = server();
  const std::string challenge = honest.receive(first);
  const int count = 100000 / testing::kSlowdown;
  for (int i = 0; i < count; ++i) {
    auto mangled = [&](std::string words) {
      switch (random() % 4) {
        case 0: words.resize(random() % (words.size() + 1)); break;
        case 1:
          for (size_t flips = 1 + random() % 8; flips-- > 0;) words[random() % words.size()] ^= 1 + random() % 255;
          break;
        case 2:
          for (char& byte : words) byte = static_cast<char>(random());
          break;
        default: words.insert(random() % words.size(), 1, static_cast<char>(random()));
      }
      return words;
    };
    ServerHandshake zero = server(keys_of(), static_cast<char>(random()));
    bool heard = random() % 2;
    std::string words = heard ? first : mangled(first);
    zero.receive(words);
    if (words != first) CHECK(zero.result() == HandshakeResult::Stranger);
    if (zero.wanted() > 0) zero.receive(mangled(std::string(zero.wanted(), 'x')));
    CHECK(zero.result() != HandshakeResult::Fine);
    ClientHandshake one(hello(static_cast<char>(random() | 0x80)), keys_of());
    one.receive(mangled(challenge));
    CHECK(one.result() != HandshakeResult::Fine && one.wanted() == 0);
  }
}

}  // namespace syncengine::tcp
