// The few Foundation classes that a Metal program meets.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/object.h"

namespace softmetal {

class String : public Object {
 public:
  explicit String(std::string text = "") : Object(class_of()), text_(std::move(text)) {}
  static ClassObject& class_of();
  const std::string& text() const { return text_; }

  static String* make() { return new String; }
  static String* string() { return autoreleased(new String); }
  static String* with_string(String* other) { return autoreleased(new String(other->text_)); }
  static String* with_c_string(const char* text, std::uint64_t encoding);
  String* init_string(String* other);
  String* init_c_string(const char* text, std::uint64_t encoding);
  String* init_bytes(char* bytes, std::uint64_t length, std::uint64_t encoding, bool free_them);
  const char* utf8() const { return text_.c_str(); }
  const char* c_string(std::uint64_t) const { return text_.c_str(); }
  std::uint64_t length() const { return text_.size(); }
  std::uint64_t length_of_bytes(std::uint64_t) const { return text_.size(); }
  bool is_equal(String* other) const { return other != nullptr && other->text_ == text_; }
  String* copy() { return static_cast<String*>(retain()); }
  String* appending(String* other) { return autoreleased(new String(text_ + other->text_)); }

 private:
  std::string text_;
};

class Error : public Object {
 public:
  Error(String* domain, std::int64_t code, const std::string& description);
  static ClassObject& class_of();
  std::int64_t code() const { return code_; }
  String* domain() const { return domain_.get(); }
  String* description() const { return description_.get(); }
  Object* user_info() const { return nullptr; }

 private:
  Ref<String> domain_;
  std::int64_t code_;
  Ref<String> description_;
};

class Url : public Object {
 public:
  Url() : Object(class_of()) {}
  static ClassObject& class_of();
  static Url* make() { return new Url; }
  static Url* file(String* path);
  Url* init_file(String* path);
  const char* file_system() const { return path_.c_str(); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Array : public Object {
 public:
  explicit Array(std::vector<Ref<Object>> objects = {})
      : Object(class_of()), objects_(std::move(objects)) {}
  static ClassObject& class_of();
  std::uint64_t count() const { return objects_.size(); }
  Object* object(std::uint64_t index) const;

 private:
  std::vector<Ref<Object>> objects_;
};

// Stores an autoreleased error where the caller asked for one.
void store_error(Error** where, String* domain, std::int64_t code, const std::string& text);

// An object that owns its argument alone becomes owned by a Ref alone.
template <typename T>
Ref<T> adopted(T* fresh) {
  Ref<T> ref(fresh);
  fresh->release();
  return ref;
}

}  // namespace softmetal
