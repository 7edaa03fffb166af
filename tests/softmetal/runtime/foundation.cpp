#include "runtime/foundation.h"

#include <cstdlib>

#include "runtime/classes.h"
#include "runtime/control.h"

namespace softmetal {

ClassObject& String::class_of() {
  static ClassObject& of =
      (new ClassObject("NSString"))
          ->class_method<&String::make>("alloc")
          .class_method<&String::string>("string")
          .class_method<&String::with_string>("stringWithString:")
          .class_method<&String::with_c_string>("stringWithCString:encoding:")
          .method<&String::init_string>("initWithString:")
          .method<&String::init_c_string>("initWithCString:encoding:")
          .method<&String::init_bytes>("initWithBytesNoCopy:length:encoding:freeWhenDone:")
          .method<&String::utf8>("UTF8String")
          .method<&String::c_string>("cStringUsingEncoding:")
          .method<&String::utf8>("fileSystemRepresentation")
          .method<&String::length>("length")
          .method<&String::length_of_bytes>("lengthOfBytesUsingEncoding:")
          .method<&String::is_equal>("isEqualToString:")
          .method<&String::is_equal>("isEqual:")
          .method<&String::copy>("copy")
          .method<&String::copy>("description")
          .method<&String::appending>("stringByAppendingString:");
  return of;
}

String* String::with_c_string(const char* text, std::uint64_t) {
  return autoreleased(new String(text));
}
String* String::init_string(String* other) {
  text_ = other->text_;
  return this;
}
String* String::init_c_string(const char* text, std::uint64_t) {
  text_ = text;
  return this;
}
String* String::init_bytes(char* bytes, std::uint64_t length, std::uint64_t, bool free_them) {
  text_.assign(bytes, length);
  if (free_them) std::free(bytes);
  return this;
}

Error::Error(String* domain, std::int64_t code, const std::string& description)
    : Object(class_of()),
      domain_(domain),
      code_(code),
      description_(adopted(new String(description))) {}

ClassObject& Error::class_of() {
  static ClassObject& of = (new ClassObject("NSError"))
                               ->method<&Error::code>("code")
                               .method<&Error::domain>("domain")
                               .method<&Error::user_info>("userInfo")
                               .method<&Error::description>("description")
                               .method<&Error::description>("localizedDescription");
  return of;
}

void store_error(Error** where, String* domain, std::int64_t code, const std::string& text) {
  if (where != nullptr) *where = autoreleased(new Error(domain, code, text));
}

ClassObject& Url::class_of() {
  static ClassObject& of = (new ClassObject("NSURL"))
                               ->class_method<&Url::make>("alloc")
                               .class_method<&Url::file>("fileURLWithPath:")
                               .method<&Url::init_file>("initFileURLWithPath:")
                               .method<&Url::file_system>("fileSystemRepresentation");
  return of;
}

Url* Url::file(String* path) { return autoreleased((new Url)->init_file(path)); }
Url* Url::init_file(String* path) {
  path_ = path->text();
  return this;
}

ClassObject& Array::class_of() {
  static ClassObject& of = (new ClassObject("NSArray"))
                               ->method<&Array::count>("count")
                               .method<&Array::object>("objectAtIndex:");
  return of;
}

Object* Array::object(std::uint64_t index) const {
  return index < objects_.size() ? objects_[index].get() : nullptr;
}

namespace {

struct OperatingSystemVersion {
  std::int64_t major, minor, patch;
};

class ProcessInfo : public Object {
 public:
  ProcessInfo() : Object(class_of()) { --class_of().live; }  // one for ever
  static ClassObject& class_of();
  static ProcessInfo* shared() {
    static ProcessInfo* info = new ProcessInfo;
    return info;
  }
  OperatingSystemVersion version() const { return {setting(Setting::kMacosMajor), 0, 0}; }
  bool at_least(OperatingSystemVersion asked) const {
    std::int64_t major = version().major;
    return major > asked.major || (major == asked.major && asked.minor <= 0 && asked.patch <= 0);
  }
};

ClassObject& ProcessInfo::class_of() {
  static ClassObject& of = (new ClassObject("NSProcessInfo"))
                               ->class_method<&ProcessInfo::shared>("processInfo")
                               .method<&ProcessInfo::version>("operatingSystemVersion")
                               .method<&ProcessInfo::at_least>("isOperatingSystemAtLeastVersion:");
  return of;
}

}  // namespace

std::vector<ClassObject*> foundation_classes() {
  return {&String::class_of(), &Error::class_of(), &Url::class_of(), &Array::class_of(),
          &ProcessInfo::class_of()};
}

}  // namespace softmetal
